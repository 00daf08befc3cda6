//! Copies of a checkpoint, to spoil.

use crate::fixture;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The files that a checkpoint needs.
const FILES: [&str; 4] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
];

/// A checkpoint's folder that is gone after the test.
pub struct Folder {
    folder: TempDir,
}

/// A tensor of a file.
#[derive(PartialEq)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Folder {
    /// A copy of the checkpoint called `name`.
    pub fn copy(name: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for file in FILES {
            let from = fixture::folder(name).join(file);
            fs::copy(&from, folder.path().join(file)).expect("a copy");
        }
        Self { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.file(name)).expect("a file to remove");
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.file(name), contents).expect("a file to write");
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).expect("a file to read")
    }

    /// All files and their contents.
    pub fn contents(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fs::read_dir(self.path())
            .expect("a folder")
            .map(|entry| entry.expect("an entry").path())
            .map(|path| {
                let contents = fs::read(&path).expect("a file to read");
                (path, contents)
            })
            .collect()
    }

    /// Sets a field of a JSON file.
    pub fn set(&self, file: &str, field: &str, value: impl Into<Value>) {
        let mut json: Value = serde_json::from_slice(&self.read(file)).expect("JSON");
        json[field] = value.into();
        self.write(file, json.to_string());
    }

    /// Changes the tensors of `model.safetensors`.
    pub fn edit(&self, change: impl FnOnce(&mut BTreeMap<String, Stored>)) {
        let mut tensors = tensors(self.path());
        change(&mut tensors);
        let views = tensors.iter().map(|(name, stored)| {
            let view = TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes);
            (name, view.expect("as many bytes as the shape has"))
        });
        let changed = serialize(views, None).expect("a file");
        self.write("model.safetensors", changed);
    }
}

/// The tensors of the `model.safetensors` in a folder.
pub fn tensors(folder: &Path) -> BTreeMap<String, Stored> {
    let file = fs::read(folder.join("model.safetensors")).expect("a file to read");
    SafeTensors::deserialize(&file)
        .expect("tensors")
        .iter()
        .map(|(name, view)| {
            let stored = Stored {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: view.data().to_vec(),
            };
            (name.to_owned(), stored)
        })
        .collect()
}
