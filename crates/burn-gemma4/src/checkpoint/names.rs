//! The names of the model's parameters in a folder's files.

use super::{files::TensorFiles, floats8, mobile, packed};
use crate::config::Gemma4Config;

/// The naming scheme of a checkpoint's tensors. A tensor's name is a prefix, which may be empty, followed by the path
/// of the tensor's parameter. Naming schemes differ only in the prefix.
pub(super) struct Names {
    pub(super) prefix: &'static str,
}

/// The prefix of the text model's tensors in a multimodal checkpoint.
const MULTIMODAL: &str = "model.language_model.";
/// The prefix of the model's tensors in a text checkpoint.
const TEXT: &str = "model.";
/// The prefix of the text model's tensors in a multimodal checkpoint that MLX has converted.
pub(super) const MLX: &str = "language_model.model.";
/// The name of the output projection's matrix, which has no prefix in any checkpoint.
pub(super) const HEAD: &str = "lm_head.weight";
/// The prefix of the names of the output projection's tensors.
const OF_HEAD: &str = "lm_head.";

/// The name prefixes of a multimodal model's tensors that see images. `vision.rs` loads these tensors.
const VISION: [&str; 3] = ["vision_tower.", "vision_embedder.", "embed_vision."];

/// The name prefixes of a multimodal model's tensors that hear audio. `audio.rs` loads these tensors.
const AUDIO: [&str; 2] = ["audio_tower.", "embed_audio."];

/// The name prefix of a multimodal model's other tensors outside the text model. This crate does not load these
/// tensors.
const OTHERS: [&str; 1] = ["multi_modal_projector."];

/// The modules of vision without a tower whose names in Hugging Face Transformers differ from those in checkpoints: the
/// path in a checkpoint, and the name.
const PROJECTED: [(&str, &str); 2] = [
    ("vision_embedder.patch_dense", "embed_vision.patch_dense"),
    (
        "embed_vision.embedding_projection",
        "embed_vision.multimodal_embedder.embedding_projection",
    ),
];

/// Returns the name in Hugging Face Transformers of a module, or of a tensor in it, in vision or audio without a tower.
pub(super) fn projected_name(path: &str) -> String {
    let mut modules = PROJECTED.iter();
    let found = modules.find_map(|(own, name)| Some((path.strip_prefix(own)?, name)));
    match found {
        Some((rest, name)) => format!("{name}{rest}"),
        None => path.into(),
    }
}

/// True if a tensor is part of a vision or audio tower, or of the projection from a tower to the text model.
pub(super) fn is_of_tower(name: &str) -> bool {
    is_of_vision(name) || is_of_audio(name) || is_of(name, &OTHERS)
}

/// True if a tensor is part of the vision: a tower, or a projection to the text model.
pub(super) fn is_of_vision(name: &str) -> bool {
    is_of(name, &VISION)
}

/// True if a tensor is part of the audio: a tower, or a projection to the text model.
pub(super) fn is_of_audio(name: &str) -> bool {
    is_of(name, &AUDIO)
}

fn is_of(name: &str, parts: &[&str]) -> bool {
    let path = name.strip_prefix(TEXT).unwrap_or(name);
    parts.iter().any(|part| path.starts_with(part))
}

impl Names {
    pub fn of(files: &TensorFiles) -> Self {
        Self::among(files.names())
    }

    /// Detects the naming scheme of a checkpoint from the names of its tensors.
    pub fn among<'a>(mut names: impl Iterator<Item = &'a str>) -> Self {
        let multimodal = names.any(|name| name.starts_with(MULTIMODAL));
        Self {
            prefix: if multimodal { MULTIMODAL } else { TEXT },
        }
    }

    /// Returns the naming scheme of a checkpoint that contains only a text model.
    pub fn of_text() -> Self {
        Self { prefix: TEXT }
    }

    /// Returns the naming scheme of a checkpoint with towers.
    pub fn of_multimodal() -> Self {
        Self { prefix: MULTIMODAL }
    }

    /// Returns the naming scheme in which the name of each tensor is the path of its parameter.
    pub fn of_paths() -> Self {
        Self { prefix: "" }
    }

    /// Returns the name that the parameter at `path` has in the files.
    pub fn in_file(&self, path: &str) -> String {
        match path == HEAD {
            true => HEAD.to_owned(),
            false => format!("{}{path}", self.prefix),
        }
    }

    /// True if the tensor called `name` is part of the text model.
    pub fn is_ours(&self, name: &str) -> bool {
        name.starts_with(self.prefix)
    }

    /// True if a tensor is allowed in the checkpoint although the model has no parameter for it.
    pub fn is_ignored(&self, name: &str, config: &Gemma4Config) -> bool {
        let Some(name) = name.strip_prefix(self.prefix) else {
            // Allow every tensor outside the text model. Allow the output projection too: some checkpoints store it
            // although the model reuses the embedding table as its output projection. Do not allow the scales of an
            // output projection, because a quantized one would have other weights than the table.
            let is_outside = self.prefix == MULTIMODAL && !name.starts_with(OF_HEAD);
            return is_outside || name == HEAD;
        };
        // A layer that shares an earlier layer's KV cache needs no K and V projections and no K norm. Published checkpoints
        // contain the tensors of these modules nevertheless.
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
            (part == "weight"
                || packed::PARTS.contains(&part)
                || floats8::PARTS.contains(&part)
                || mobile::PARTS.contains(&part))
                && config.is_shared(layer)
                && layer < config.num_layers()
        })
    }
}
