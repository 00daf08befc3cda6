//! Creates copies of checkpoints that tests can change.

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

/// The chain of tokens for [`Folder::that_writes`]: `x`, a thought, an answer, a tool call, and the end of the turn.
pub const WRITING: [u32; 18] = [
    304, 13, 307, 295, 301, 287, 288, 300, 34, 281, 14, 282, 283, 19, 284, 16, 20, 12,
];

/// The texts of the thought, the answer and the tool call that [`WRITING`] contains.
pub mod written {
    pub const THOUGHTS: &str = "a";
    pub const ANSWER: &str = "bc";
    pub const TOOL_CALL: &str = "d<|\"|>";
}

/// A checkpoint folder that is deleted after the test.
pub struct Folder {
    folder: TempDir,
}

/// A tensor of a safetensors file.
#[derive(Clone, PartialEq)]
pub struct Stored {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Folder {
    /// Returns a copy of a model checkpoint, the fixture `name`.
    pub fn copy(name: &str) -> Self {
        Self::copy_of(name, &FILES)
    }

    /// Returns a copy of the small trained bf16 checkpoint that `burn-gemma4` embeds.
    pub fn embedded() -> Self {
        let files = [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
        ];
        Self::copy_of("../../crates/burn-gemma4/embedded", &files)
    }

    /// Returns a copy of a drafter, the fixture `name`.
    pub fn drafter(name: &str) -> Self {
        Self::copy_of(name, &["config.json", "model.safetensors"])
    }

    fn copy_of(name: &str, files: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        for file in files {
            let from = fixture::folder(name).join(file);
            fs::copy(&from, folder.path().join(file)).expect("the file is copied");
        }
        Self { folder }
    }

    /// Returns a checkpoint whose text depends only on the last token. After each token of `chain`, the model generates
    /// the next token of `chain`. The tokens of `chain` must be distinct, and `chain` may have at most 25 tokens.
    pub fn that_writes(chain: &[u32]) -> Self {
        let folder = Self::copy("dense-ple");
        // The checkpoint has no softcap, because a softcap would make all large logits equal.
        folder.set("config.json", "final_logit_softcapping", Value::Null);
        folder.edit(|tensors| {
            for (name, tensor) in tensors.iter_mut() {
                // The layers pass the embedding on unchanged, because their output projections are 0 and their layer scalars
                // are 1.
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
            // The embeddings of a token and of the next token have one direction in common. The embedding of the next
            // token is longer, so the next token has the largest logit.
            let embedding = tensors
                .get_mut("model.embed_tokens.weight")
                .expect("the tensor exists");
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

    /// Returns a drafter for a checkpoint from [`Folder::that_writes`]. The draft tokens follow the chain of this
    /// checkpoint. The drafter uses only the first columns of a token's embedding.
    pub fn drafter_of_chain(&self) -> Self {
        let folder = Self::drafter("assistant-ple");
        // The drafter searches all of its 16 groups of tokens, so it finds every token of the chain.
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
            let projection = tensors
                .get_mut("pre_projection.weight")
                .expect("the tensor exists");
            let [rows, columns] = projection.shape[..] else {
                panic!("a matrix");
            };
            for row in 0..rows {
                let start = 4 * (row * columns + row);
                projection.bytes[start..start + 4].copy_from_slice(&1.0f32.to_le_bytes());
            }
            let table = tensors
                .get_mut("model.embed_tokens.weight")
                .expect("the tensor exists");
            let of_row = embedding.bytes.chunks(4 * embedding.shape[1]);
            table.bytes = of_row.flat_map(|row| row[..4 * rows].to_vec()).collect();
        });
        folder
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the path of a file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.file(name)).expect("the file is removed");
    }

    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) {
        fs::write(self.file(name), contents).expect("the file is writable");
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.file(name)).expect("the file is readable")
    }

    /// Returns the paths and the contents of all files in the folder.
    pub fn contents(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        fs::read_dir(self.path())
            .expect("the folder is readable")
            .map(|entry| entry.expect("the folder is readable").path())
            .map(|path| {
                let contents = fs::read(&path).expect("the file is readable");
                (path, contents)
            })
            .collect()
    }

    /// Sets a top-level field of a JSON file in the folder.
    pub fn set(&self, file: &str, field: &str, value: impl Into<Value>) {
        let mut json: Value = serde_json::from_slice(&self.read(file)).expect("the text is JSON");
        json[field] = value.into();
        self.write(file, json.to_string());
    }

    /// Applies `change` to the tensors of `model.safetensors` in the folder.
    pub fn edit(&self, change: impl FnOnce(&mut BTreeMap<String, Stored>)) {
        let mut tensors = tensors(self.path());
        change(&mut tensors);
        let views = tensors.iter().map(|(name, stored)| {
            let view = TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes);
            (name, view.expect("the bytes fit the shape"))
        });
        let changed = serialize(views, None).expect("the file is written");
        self.write("model.safetensors", changed);
    }
}

/// Returns the tensors of the file `model.safetensors` in `folder`.
pub fn tensors(folder: &Path) -> BTreeMap<String, Stored> {
    let file = fs::read(folder.join("model.safetensors")).expect("the file is readable");
    SafeTensors::deserialize(&file)
        .expect("the tensors parse")
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
