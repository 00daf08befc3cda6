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

/// For [`Folder::that_writes`]: after `x` a thought, an answer and the call of a tool, and the end of the turn.
pub const WRITING: [u32; 18] = [
    304, 13, 307, 295, 301, 287, 288, 300, 34, 281, 14, 282, 283, 19, 284, 16, 20, 12,
];

/// What that says.
pub mod written {
    pub const THOUGHTS: &str = "a";
    pub const ANSWER: &str = "bc";
    pub const TOOL_CALL: &str = "d<|\"|>";
}

/// A checkpoint's folder that is gone after the test.
pub struct Folder {
    folder: TempDir,
}

/// A tensor of a file.
#[derive(Clone, PartialEq)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Folder {
    /// A copy of the checkpoint called `name`.
    pub fn copy(name: &str) -> Self {
        Self::copy_of(name, &FILES)
    }

    /// A copy of the model in the program, which has learned something, in bf16.
    pub fn embedded() -> Self {
        let files = [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ];
        Self::copy_of("../../crates/burn-gemma4/embedded", &files)
    }

    /// A copy of the drafter called `name`.
    pub fn drafter(name: &str) -> Self {
        Self::copy_of(name, &["config.json", "model.safetensors"])
    }

    fn copy_of(name: &str, files: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for file in files {
            let from = fixture::folder(name).join(file);
            fs::copy(&from, folder.path().join(file)).expect("a copy");
        }
        Self { folder }
    }

    /// A checkpoint that goes on from a token of `chain` with the token after it, whatever came before. No token is in it
    /// twice, and there are 25 at most.
    pub fn that_writes(chain: &[u32]) -> Self {
        let folder = Self::copy("dense-ple");
        // A cap would make all large logits the same.
        folder.set("config.json", "final_logit_softcapping", Value::Null);
        folder.edit(|tensors| {
            for (name, tensor) in tensors.iter_mut() {
                // Nothing is added to the embedding on its way through the layers.
                let value: Option<f32> = match name.rsplit('.').nth(1) {
                    _ if name == "model.norm.weight" || name.ends_with("layer_scalar") => Some(1.0),
                    Some("embed_tokens" | "o_proj" | "down_proj" | "per_layer_projection") => {
                        Some(0.0)
                    }
                    _ => None,
                };
                if let Some(value) = value {
                    let count = tensor.bytes.len() / 4;
                    tensor.bytes = value.to_le_bytes().repeat(count);
                }
            }
            // A token's embedding has a direction in common with the next one's, which is longer.
            let embedding = tensors.get_mut("model.embed_tokens.weight").expect("it");
            let columns = embedding.shape[1];
            for (index, token) in chain.iter().enumerate() {
                let row = 4 * columns * *token as usize;
                let length = 4.0f32.powi(index as i32).to_le_bytes();
                for direction in [Some(index), index.checked_sub(1)].into_iter().flatten() {
                    let start = row + 4 * direction;
                    embedding.bytes[start..start + 4].copy_from_slice(&length);
                }
            }
        });
        folder
    }

    /// The drafter that guesses what this writes: of a token it looks at the first columns of the embedding, and at nothing else.
    pub fn drafter_of_chain(&self) -> Self {
        let folder = Self::drafter("assistant-ple");
        // All groups are looked at.
        folder.set("config.json", "centroid_intermediate_top_k", 16);
        let embedding = tensors(self.path())["model.embed_tokens.weight"].clone();
        folder.edit(|tensors| {
            for (name, tensor) in tensors.iter_mut() {
                let value: Option<f32> = match name.rsplit('.').nth(1) {
                    _ if name == "model.norm.weight" || name.ends_with("layer_scalar") => Some(1.0),
                    Some("o_proj" | "down_proj" | "pre_projection") => Some(0.0),
                    _ => None,
                };
                if let Some(value) = value {
                    let count = tensor.bytes.len() / 4;
                    tensor.bytes = value.to_le_bytes().repeat(count);
                }
            }
            let projection = tensors.get_mut("pre_projection.weight").expect("it");
            let [rows, columns] = projection.shape[..] else {
                panic!("a matrix");
            };
            for row in 0..rows {
                let start = 4 * (row * columns + row);
                projection.bytes[start..start + 4].copy_from_slice(&1.0f32.to_le_bytes());
            }
            let table = tensors.get_mut("model.embed_tokens.weight").expect("it");
            let of_row = embedding.bytes.chunks(4 * embedding.shape[1]);
            table.bytes = of_row.flat_map(|row| row[..4 * rows].to_vec()).collect();
        });
        folder
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
