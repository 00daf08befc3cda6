//! Reads the `config.json` of EmbeddingGemma 2, a model that computes embeddings of texts.

use super::Gemma4Config;
use super::json::{Text, parse_file};
use super::quantization::schemes_of;
use super::unknown_models::EMBEDDING_MODELS;
use super::validate::LARGEST_TENSOR;
use crate::error::Gemma4Error;
use crate::json;
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// The configuration of an EmbeddingGemma 2 model, an encoder of Gemma 4's layers.
///
/// Each token sees the tokens of its text in both directions. In sliding layers, it sees those within
/// [`window_radius`](Self::window_radius).
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingGemmaConfig {
    /// The configuration of the layers. Its `sliding_window` is the window radius plus one.
    pub text: Gemma4Config,
    /// The number of elements of a text's embedding.
    pub embedding_dim: usize,
}

#[derive(Deserialize)]
struct File {
    text_config: Option<Value>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
}

#[derive(Deserialize)]
struct Embedding {
    embedding_dim: Option<usize>,
}

fn refuse<T>(reason: String) -> Result<T, Gemma4Error> {
    Err(Gemma4Error::Config(reason))
}

impl EmbeddingGemmaConfig {
    /// Reads the `config.json` of an EmbeddingGemma 2 checkpoint.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, is not JSON, or does not describe an EmbeddingGemma 2 model.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        parse_file(path.as_ref(), Self::from_json)
    }

    /// Parses the text of a `config.json`. The sizes of the layers and the number of layers and heads are required. Any
    /// other missing field gets the default value of Hugging Face Transformers' configuration class.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the field at fault.
    pub fn from_json(json: &str) -> Result<Self, Gemma4Error> {
        let bad = Gemma4Error::Config;
        let value: Value = json::from_slice(json.as_bytes()).map_err(bad)?;
        let model_type = value.get("model_type").and_then(Value::as_str);
        if !model_type.is_some_and(|name| EMBEDDING_MODELS.contains(&name)) {
            let found = model_type.map_or_else(|| "missing".into(), |name| format!("{name:?}"));
            return refuse(format!(
                "model_type is {found}, which is not an embedding model's; expected one of {EMBEDDING_MODELS:?}"
            ));
        }
        schemes_of(json)?.refuse_mobile("an embedding model")?;
        let file: File = json::from_value(&value).map_err(bad)?;
        let (mut text, embedding): (Text, Embedding) = match &file.text_config {
            Some(fields) => (
                json::from_field("text_config", fields).map_err(bad)?,
                json::from_field("text_config", fields).map_err(bad)?,
            ),
            None => (
                json::from_value(&value).map_err(bad)?,
                json::from_value(&value).map_err(bad)?,
            ),
        };
        text.fill_dtype(file.dtype.or(file.torch_dtype));
        let radius = text.fill_embedding_defaults()?;
        let mut text = text.into_config()?;
        text.sliding_window = radius.saturating_add(1);
        let config = Self {
            text,
            embedding_dim: embedding.embedding_dim.unwrap_or(768),
        };
        config.validate()?;
        Ok(config)
    }

    /// True if the text of a `config.json` is that of an embedding model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`] if the text is not JSON.
    pub fn is_in(json: &str) -> Result<bool, Gemma4Error> {
        let value: Value = json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?;
        let model_type = value.get("model_type").and_then(Value::as_str);
        Ok(model_type.is_some_and(|name| EMBEDDING_MODELS.contains(&name)))
    }

    /// Returns the largest distance between a query and a key that the query sees in a sliding layer, in tokens.
    pub fn window_radius(&self) -> usize {
        self.text.sliding_window - 1
    }

    /// Checks that a model with this configuration can exist.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the field of `config.json` at fault.
    pub fn validate(&self) -> Result<(), Gemma4Error> {
        let text = &self.text;
        for (name, is_there) in [
            ("num_kv_shared_layers", text.num_kv_shared_layers > 0),
            ("enable_moe_block", text.experts.is_some()),
            ("use_double_wide_mlp", text.use_double_wide_mlp),
            ("attention_k_eq_v", text.attention_k_eq_v),
        ] {
            if is_there {
                return refuse(format!(
                    "{name} is set, but embedding models do not support it"
                ));
            }
        }
        if !text.has_per_layer_embeddings() {
            return refuse(
                "hidden_size_per_layer_input is 0, but an embedding model has per-layer embeddings"
                    .into(),
            );
        }
        text.validate()?;
        let elements = self.embedding_dim.checked_mul(text.hidden_size);
        match self.embedding_dim == 0 || elements.is_none_or(|count| count > LARGEST_TENSOR) {
            true => refuse(format!(
                "embedding_dim is {}, which does not give a valid tensor",
                self.embedding_dim
            )),
            false => Ok(()),
        }
    }

    /// Checks a number of elements to which embeddings are truncated.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the number is 0 or more than [`embedding_dim`](Self::embedding_dim).
    pub fn check_dimensions(&self, dimensions: usize) -> Result<(), Gemma4Error> {
        match (1..=self.embedding_dim).contains(&dimensions) {
            true => Ok(()),
            false => Err(Gemma4Error::Argument {
                argument: "dimensions",
                reason: format!(
                    "is {dimensions}; expected a number from 1 to {}",
                    self.embedding_dim
                ),
            }),
        }
    }
}
