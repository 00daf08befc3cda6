//! Reads the `config.json` of a drafter, a small model that proposes draft tokens in speculative decoding.

use super::Gemma4Config;
use super::json::{Text, parse_file};
use super::quantization::schemes_of;
use super::unknown_models::DRAFTERS;
use super::validate::LARGEST_TENSOR;
use crate::config::LayerType;
use crate::error::Gemma4Error;
use crate::json;
use serde::Deserialize;
use std::path::Path;

/// The configuration of a drafter, which proposes tokens that a target model verifies. The drafter reads the target
/// model's KV cache.
#[derive(Clone, Debug, PartialEq)]
pub struct DrafterConfig {
    /// The configuration of the drafter's own layers. These layers do not compute keys and values.
    pub text: Gemma4Config,
    /// The width of the target model's residual stream.
    pub backbone_hidden_size: usize,
    /// The parameters of a head that computes logits only for selected groups of tokens. `None` if the head computes
    /// the logits of all tokens.
    pub ordered_embeddings: Option<OrderedEmbeddings>,
}

/// The parameters of a head that first selects groups of tokens, and then computes logits only for the tokens of these
/// groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderedEmbeddings {
    /// The number of groups. All groups have equally many tokens.
    pub num_centroids: usize,
    /// The number of groups that the head selects at each position.
    pub top_k: usize,
}

#[derive(Deserialize)]
struct File {
    text_config: Text,
    tie_word_embeddings: Option<bool>,
    backbone_hidden_size: Option<usize>,
    use_ordered_embeddings: Option<bool>,
    num_centroids: Option<usize>,
    centroid_intermediate_top_k: Option<usize>,
}

fn refuse<T>(reason: String) -> Result<T, Gemma4Error> {
    Err(Gemma4Error::Config(reason))
}

impl DrafterConfig {
    /// Reads a drafter's `config.json`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, is not JSON, or does not describe a drafter.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        parse_file(path.as_ref(), Self::from_json)
    }

    /// Parses the text of a drafter's `config.json`. A missing field gets the default value of Hugging Face
    /// Transformers' configuration class.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the field at fault.
    pub fn from_json(json: &str) -> Result<Self, Gemma4Error> {
        let bad = Gemma4Error::Config;
        let value: serde_json::Value = json::from_slice(json.as_bytes()).map_err(bad)?;
        let model_type = value.get("model_type").and_then(|name| name.as_str());
        if !model_type.is_some_and(|name| DRAFTERS.contains(&name)) {
            let found = model_type.map_or_else(|| "missing".into(), |name| format!("{name:?}"));
            return refuse(format!(
                "model_type is {found}, which is no drafter's; expected one of {DRAFTERS:?}"
            ));
        }
        schemes_of(json)?.refuse_mobile("a drafter")?;
        let file: File = json::from_slice(json.as_bytes()).map_err(bad)?;
        let mut text = file.text_config;
        // If `text_config` has no `tie_word_embeddings`, use the value at the top level of the file. The file of a
        // Gemma 4 model is read in this way too.
        text.tie_word_embeddings = text.tie_word_embeddings.or(file.tie_word_embeddings);
        let mut text = text.into_config()?;
        if text.num_kv_shared_layers == 0 {
            text.num_kv_shared_layers = text.num_layers();
        }
        let ordered = file.use_ordered_embeddings.unwrap_or(false);
        let config = Self {
            text,
            backbone_hidden_size: file.backbone_hidden_size.unwrap_or(1536),
            ordered_embeddings: ordered.then(|| OrderedEmbeddings {
                num_centroids: file.num_centroids.unwrap_or(2048),
                top_k: file.centroid_intermediate_top_k.unwrap_or(32),
            }),
        };
        config.validate()?;
        Ok(config)
    }

    /// Checks that a drafter with this configuration can exist.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the field of `config.json` at fault.
    pub fn validate(&self) -> Result<(), Gemma4Error> {
        let text = &self.text;
        for (name, is_there) in [
            (
                "hidden_size_per_layer_input",
                text.has_per_layer_embeddings(),
            ),
            ("enable_moe_block", text.experts.is_some()),
            ("use_double_wide_mlp", text.use_double_wide_mlp),
        ] {
            if is_there {
                return refuse(format!("{name} is set, but drafters do not support it"));
            }
        }
        text.validate_with(|text| {
            match text.num_kv_shared_layers == text.num_layers() {
                true => Ok(()),
                false => refuse(format!(
                    "num_kv_shared_layers is {}, but all {} layers of a drafter must read the target model's KV cache",
                    text.num_kv_shared_layers,
                    text.num_layers()
                )),
            }
        })?;
        if !text.tie_word_embeddings {
            return refuse(
                "tie_word_embeddings is false, but drafters tie their embeddings".into(),
            );
        }
        let elements = self.backbone_hidden_size.checked_mul(2 * text.hidden_size);
        if self.backbone_hidden_size == 0 || elements.is_none_or(|count| count > LARGEST_TENSOR) {
            return refuse(format!(
                "backbone_hidden_size is {}, which does not give a valid tensor",
                self.backbone_hidden_size
            ));
        }
        match self.ordered_embeddings {
            Some(OrderedEmbeddings {
                num_centroids,
                top_k,
            }) if num_centroids == 0
                || !text.vocab_size.is_multiple_of(num_centroids)
                || top_k == 0
                || top_k > num_centroids =>
            {
                refuse(format!(
                    "centroid_intermediate_top_k {top_k} of num_centroids {num_centroids} do not divide {} tokens into groups",
                    text.vocab_size
                ))
            }
            _ => Ok(()),
        }
    }

    /// Checks that the drafter's sizes fit the target model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`], which names each size that differs.
    pub fn check_target(&self, target: &Gemma4Config) -> Result<(), Gemma4Error> {
        let text = &self.text;
        let own = &target.layer_types[..target.first_shared_layer()];
        let has = |kind| text.layer_types.contains(&kind);
        let mut wrong = Vec::new();
        let mut check = |name: &str, found: usize, expected: usize| {
            if found != expected {
                wrong.push(format!("{name} is {found} rather than {expected}"));
            }
        };
        check("vocab_size", text.vocab_size, target.vocab_size);
        check(
            "backbone_hidden_size",
            self.backbone_hidden_size,
            target.hidden_size,
        );
        if has(LayerType::Sliding) {
            check("head_dim", text.sliding_head_dim, target.sliding_head_dim);
            check(
                "num_key_value_heads",
                text.num_key_value_heads,
                target.num_key_value_heads,
            );
            check("sliding_window", text.sliding_window, target.sliding_window);
        }
        if has(LayerType::Full) {
            check(
                "global_head_dim",
                text.global_head_dim,
                target.global_head_dim,
            );
            check(
                "num_global_key_value_heads",
                text.num_global_key_value_heads,
                target.num_global_key_value_heads,
            );
        }
        for (kind, found, expected) in [
            (LayerType::Sliding, &text.sliding_rope, &target.sliding_rope),
            (LayerType::Full, &text.global_rope, &target.global_rope),
        ] {
            if has(kind) && found != expected {
                wrong.push(format!(
                    "rope_parameters.{kind} is {found:?} rather than {expected:?}"
                ));
            }
            if has(kind) && !own.contains(&kind) {
                wrong.push(format!(
                    "layer_types has {kind}, but no such layer of the model has a KV cache"
                ));
            }
        }
        match wrong.is_empty() {
            true => Ok(()),
            false => Err(Gemma4Error::Argument {
                argument: "drafter",
                reason: format!("is not for this model: its {}", wrong.join(", its ")),
            }),
        }
    }
}
