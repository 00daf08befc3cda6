//! `config.json` of drafters, the small models that guess tokens for a large one.

use super::{
    Gemma4Config, foreign::DRAFTERS, json::Text, quantization::schemes_of, validate::LARGEST_TENSOR,
};
use crate::{Gemma4Error, LayerType, checkpoint::missing, json};
use serde::Deserialize;
use std::{fs, path::Path};

/// The shape of a drafter, which reads the keys and values of the model that it guesses for.
#[derive(Clone, Debug, PartialEq)]
pub struct DrafterConfig {
    /// Its own layers, none of which makes keys and values.
    pub text: Gemma4Config,
    /// Columns of the residual stream of the model that it guesses for.
    pub backbone_hidden_size: usize,
    /// How its head finds the tokens worth a look; without, it looks at all.
    pub ordered_embeddings: Option<OrderedEmbeddings>,
}

/// A head that first chooses among groups of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OrderedEmbeddings {
    /// Groups of as many tokens each.
    pub num_centroids: usize,
    /// Groups whose tokens are looked at.
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
    /// Where the file cannot be read, is not JSON, or describes no drafter.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        let path = path.as_ref();
        let text = fs::read_to_string(path).map_err(|source| missing(path.to_owned(), source))?;
        Self::from_json(&text).map_err(|error| match error {
            Gemma4Error::Config(reason) => Gemma4Error::Malformed {
                path: path.to_owned(),
                reason,
            },
            other => other,
        })
    }

    /// Reads the text of a drafter's `config.json`. Fields that are absent have the values of transformers' class.
    ///
    /// # Errors
    /// [`Gemma4Error::Config`] naming the field.
    pub fn from_json(json: &str) -> Result<Self, Gemma4Error> {
        let bad = Gemma4Error::Config;
        let value: serde_json::Value = json::from_slice(json.as_bytes()).map_err(bad)?;
        let model_type = value.get("model_type").and_then(|name| name.as_str());
        if !model_type.is_some_and(|name| DRAFTERS.contains(&name)) {
            let found = model_type.map_or_else(|| "missing".into(), |name| format!("{name:?}"));
            return refuse(format!(
                "model_type is {found}, which is no drafter's: one of {DRAFTERS:?}"
            ));
        }
        schemes_of(json)?;
        let file: File = json::from_slice(json.as_bytes()).map_err(bad)?;
        let mut text = file.text_config;
        // As in a model's file, where the part says nothing, the whole's field holds.
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

    /// What makes the drafter impossible, by the names of `config.json`.
    ///
    /// # Errors
    /// [`Gemma4Error::Config`] naming the field.
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
                return refuse(format!("{name} is set, which no drafter has"));
            }
        }
        text.validate_with(|text| {
            match text.num_kv_shared_layers == text.num_layers() {
                true => Ok(()),
                false => refuse(format!(
                    "num_kv_shared_layers is {}, but all {} layers of a drafter read another model's keys and values",
                    text.num_kv_shared_layers,
                    text.num_layers()
                )),
            }
        })?;
        if !text.tie_word_embeddings {
            return refuse("tie_word_embeddings is false, which no drafter has".into());
        }
        let elements = self.backbone_hidden_size.checked_mul(2 * text.hidden_size);
        if self.backbone_hidden_size == 0 || elements.is_none_or(|count| count > LARGEST_TENSOR) {
            return refuse(format!(
                "backbone_hidden_size is {}, which makes no tensor",
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
                    "centroid_intermediate_top_k {top_k} of num_centroids {num_centroids} make no groups of {} tokens",
                    text.vocab_size
                ))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a drafter for another model than `target`, by the sizes that differ.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] naming them.
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
                    "layer_types has {kind}, but no such layer of the model has keys"
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
