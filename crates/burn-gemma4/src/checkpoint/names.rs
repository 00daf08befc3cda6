//! How the files of a folder call the model's parameters.

use super::{files::TensorFiles, packed};
use crate::Gemma4Config;

/// How the file calls the model's tensors.
pub(super) struct Names {
    pub(super) prefix: &'static str,
}

/// Before the text model's tensors in a multimodal checkpoint.
const MULTIMODAL: &str = "model.language_model.";
/// Before the model's tensors in a text checkpoint.
const TEXT: &str = "model.";
/// Before them in what MLX makes of a multimodal checkpoint.
pub(super) const MLX: &str = "language_model.model.";
/// The output projection, which is outside of both.
pub(super) const HEAD: &str = "lm_head.weight";

/// The name that `torch.compile` gives to the module inside a compiled one.
const COMPILED: &str = "_orig_mod";

/// A tensor's name without the parts that `torch.compile` has put into it.
pub(super) fn uncompiled(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| *part != COMPILED).collect();
    parts.join(".")
}

/// The parts of a multimodal model beside the text model, which have no tensors here.
const TOWERS: [&str; 5] = [
    "vision_tower.",
    "audio_tower.",
    "embed_vision.",
    "embed_audio.",
    "multi_modal_projector.",
];

/// True if a tensor of a multimodal model belongs to a tower, or to the projection from a tower to the text model.
pub(super) fn is_of_tower(name: &str) -> bool {
    let name = name.strip_prefix(TEXT).unwrap_or(name);
    TOWERS.iter().any(|tower| name.starts_with(tower))
}

impl Names {
    pub fn of(files: &TensorFiles) -> Self {
        Self::among(files.names())
    }

    /// Those of a checkpoint that calls its tensors so.
    pub fn among<'a>(mut names: impl Iterator<Item = &'a str>) -> Self {
        let multimodal = names.any(|name| name.starts_with(MULTIMODAL));
        Self {
            prefix: if multimodal { MULTIMODAL } else { TEXT },
        }
    }

    /// Those of a text checkpoint.
    pub fn of_text() -> Self {
        Self { prefix: TEXT }
    }

    /// Those that are the parameters' paths.
    pub fn of_paths() -> Self {
        Self { prefix: "" }
    }

    /// The name in the file of the parameter at `path`.
    pub fn in_file(&self, path: &str) -> String {
        match path == HEAD {
            true => HEAD.to_owned(),
            false => format!("{}{path}", self.prefix),
        }
    }

    /// Whether a tensor is of the text model.
    pub fn is_ours(&self, name: &str) -> bool {
        name.starts_with(self.prefix)
    }

    /// Whether a tensor that the model does not have belongs in a checkpoint all the same.
    pub fn is_ignored(&self, name: &str, config: &Gemma4Config) -> bool {
        let Some(name) = name.strip_prefix(self.prefix) else {
            // The other towers of a multimodal checkpoint; a head that repeats the embedding's table.
            return self.prefix == MULTIMODAL || name == HEAD;
        };
        // Published checkpoints still have keys and values for layers that read an earlier layer's.
        const UNREAD: [&str; 3] = [
            "self_attn.k_proj.",
            "self_attn.v_proj.",
            "self_attn.k_norm.",
        ];
        let shared = || {
            let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
            let part = UNREAD.iter().find_map(|module| rest.strip_prefix(module))?;
            Some((layer.parse::<usize>().ok()?, part))
        };
        shared().is_some_and(|(layer, part)| {
            (part == "weight" || packed::PARTS.contains(&part))
                && config.is_shared(layer)
                && layer < config.num_layers()
        })
    }
}
