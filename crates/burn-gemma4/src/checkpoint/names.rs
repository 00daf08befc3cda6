//! How a folder's files call the model's parameters.

use super::{
    files::TensorFiles,
    source::{Source, Weights, burn_dtype},
};
use crate::{Gemma4Config, Gemma4Error, TensorProblem};
use std::{collections::BTreeSet, path::Path};

/// The weights of a folder's files.
pub(super) struct Folder<'a> {
    files: &'a TensorFiles,
    names: Names,
}

impl<'a> Folder<'a> {
    pub fn of(files: &'a TensorFiles) -> Self {
        let names = Names::of(files);
        Self { files, names }
    }

    /// Refuses MLX's names: it lays experts and towers out in other ways, too.
    pub fn refuse_mlx(&self, folder: &Path) -> Result<(), Gemma4Error> {
        let is_mlx = |name: &str| name.starts_with(MLX);
        let is_ours = |name: &str| name.starts_with(self.names.prefix);
        match self.files.names().any(is_mlx) && !self.files.names().any(is_ours) {
            true => Err(Gemma4Error::Unsupported {
                path: folder.into(),
                reason: format!(
                    "its tensors' names begin with {MLX}, as MLX writes them; take the checkpoint that it was made of"
                ),
            }),
            false => Ok(()),
        }
    }
}

impl Weights for Folder<'_> {
    fn names(&self, path: &str) -> Vec<String> {
        vec![self.names.in_file(path)]
    }

    fn get(&self, path: &str) -> Result<Source<'_>, TensorProblem> {
        let name = self.names.in_file(path);
        let Some(entry) = self.files.get(&name) else {
            return Err(TensorProblem::Missing { name });
        };
        match burn_dtype(entry.dtype) {
            Some(dtype) => {
                let bytes = self.files.bytes(entry);
                Ok(Source::floats(entry.shape.clone(), dtype, bytes))
            }
            None => Err(TensorProblem::Dtype {
                name,
                found: format!("{:?}", entry.dtype),
            }),
        }
    }

    fn unknown(&self, known: &BTreeSet<String>, config: &Gemma4Config) -> Vec<String> {
        let names = self.files.names();
        names
            .filter(|name| !known.contains(*name) && !self.names.is_ignored(name, config))
            .map(String::from)
            .collect()
    }
}

/// How the file calls the model's tensors.
pub(super) struct Names {
    prefix: &'static str,
}

/// Before the text model's tensors in a multimodal checkpoint.
const MULTIMODAL: &str = "model.language_model.";
/// Before the model's tensors in a text checkpoint.
const TEXT: &str = "model.";
/// Before them in what MLX makes of a multimodal checkpoint.
const MLX: &str = "language_model.model.";
/// The output projection, which is outside of both.
pub(super) const HEAD: &str = "lm_head.weight";

impl Names {
    pub fn of(files: &TensorFiles) -> Self {
        let multimodal = files.names().any(|name| name.starts_with(MULTIMODAL));
        Self {
            prefix: if multimodal { MULTIMODAL } else { TEXT },
        }
    }

    /// Those of a text checkpoint.
    pub fn of_text() -> Self {
        Self { prefix: TEXT }
    }

    /// The name in the file of the parameter at `path`.
    pub fn in_file(&self, path: &str) -> String {
        match path == HEAD {
            true => HEAD.to_owned(),
            false => format!("{}{path}", self.prefix),
        }
    }

    /// Whether a tensor that the model does not have belongs in a checkpoint all the same.
    fn is_ignored(&self, name: &str, config: &Gemma4Config) -> bool {
        let Some(name) = name.strip_prefix(self.prefix) else {
            // The other towers of a multimodal checkpoint; a head that repeats the embedding's table.
            return self.prefix == MULTIMODAL || name == HEAD;
        };
        // Published checkpoints still have keys and values for layers that read an earlier layer's.
        let shared = name
            .strip_prefix("layers.")
            .and_then(|rest| rest.split_once('.'))
            .and_then(|(layer, rest)| Some((layer.parse::<usize>().ok()?, rest)));
        matches!(
            shared,
            Some((
                layer,
                "self_attn.k_proj.weight" | "self_attn.v_proj.weight" | "self_attn.k_norm.weight"
            )) if config.is_shared(layer) && layer < config.num_layers()
        )
    }
}
