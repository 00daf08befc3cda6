//! Reads `config.json` in two dialects: the dialect of the Hugging Face Hub, and the dialect that `save_pretrained` of
//! Hugging Face Transformers writes.

mod rope;

use super::quantization::schemes_of;
use super::unknown_models::refuse_other_model;
use super::validate::number_of_layers;
use super::{ExpertsConfig, Gemma4Config, LayerType, RopeConfig};
use crate::config::unknown_files::missing;
use crate::error::Gemma4Error;
use crate::json;
use burn::tensor::DType;
use rope::{Rope, scales};
use serde::Deserialize;
use std::{collections::BTreeMap, fs, path::Path};

/// The values of `model_type` in files that contain a text model which this crate can load.
const MODEL_TYPES: [&str; 4] = [
    "gemma4",
    "gemma4_text",
    "gemma4_unified",
    "gemma4_unified_text",
];

/// The beginning of the `model_type` of models like 12B, which see images without a vision tower.
const UNIFIED: &str = "gemma4_unified";

/// The top level of a `config.json`. A text model's fields are at the top level. A multimodal model has one object per
/// submodel, such as `text_config`.
#[derive(Deserialize)]
struct File {
    model_type: Option<String>,
    text_config: Option<serde_json::Value>,
    eos_token_id: Option<Tokens>,
    dtype: Option<String>,
    torch_dtype: Option<String>,
    tie_word_embeddings: Option<bool>,
    rope_scaling: Option<serde_json::Value>,
}

#[derive(Deserialize)]
pub(super) struct Text {
    vocab_size: Option<usize>,
    vocab_size_per_layer_input: Option<usize>,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    num_global_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    global_head_dim: Option<usize>,
    per_layer_config: Option<BTreeMap<String, PerLayer>>,
    layer_types: Option<Vec<String>>,
    sliding_window: Option<usize>,
    /// Only the class for embedding models reads this field.
    sliding_window_pattern: Option<usize>,
    num_kv_shared_layers: Option<usize>,
    use_double_wide_mlp: Option<bool>,
    hidden_size_per_layer_input: Option<usize>,
    attention_k_eq_v: Option<bool>,
    enable_moe_block: Option<bool>,
    num_experts: Option<usize>,
    top_k_experts: Option<usize>,
    moe_intermediate_size: Option<usize>,
    rope_parameters: Option<BTreeMap<String, Rope>>,
    rope_scaling: Option<serde_json::Value>,
    rms_norm_eps: Option<f64>,
    final_logit_softcapping: Option<f64>,
    pub(super) tie_word_embeddings: Option<bool>,
    max_position_embeddings: Option<usize>,
    initializer_range: Option<f64>,
    hidden_activation: Option<String>,
    attention_bias: Option<bool>,
    use_bidirectional_attention: Option<String>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<Tokens>,
    pad_token_id: Option<u32>,
    dtype: Option<String>,
}

/// The fields of one layer's entry in `per_layer_config`. An entry holds only the values in which the layer differs
/// from other layers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PerLayer {
    head_dim: Option<usize>,
    num_key_value_heads: Option<usize>,
}

/// One token or a list of tokens.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "invalid type: expected a token or a list of tokens"
)]
pub(crate) enum Tokens {
    One(u32),
    Several(Vec<u32>),
}

impl Tokens {
    pub(crate) fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(token) => vec![token],
            Self::Several(tokens) => tokens,
        }
    }
}

/// Reads the `config.json` at `path` with `parse`. An error of its contents names the file.
pub(super) fn parse_file<T>(
    path: &Path,
    parse: impl FnOnce(&str) -> Result<T, Gemma4Error>,
) -> Result<T, Gemma4Error> {
    let text = fs::read_to_string(path).map_err(|source| missing(path.to_owned(), source))?;
    parse(&text).map_err(|error| match error {
        Gemma4Error::Config(reason) => Gemma4Error::Malformed {
            path: path.to_owned(),
            reason,
        },
        other => other,
    })
}

impl Gemma4Config {
    /// Reads a checkpoint's `config.json`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, is not JSON, or does not describe a Gemma 4 text model.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, Gemma4Error> {
        parse_file(path.as_ref(), Self::from_json)
    }

    /// Parses the text of a `config.json`. For a multimodal model, returns the configuration of its text model.
    ///
    /// Two dialects are supported. Files on the Hub have the fields `global_head_dim` and `num_global_key_value_heads`.
    /// Files that `save_pretrained` of Hugging Face Transformers writes have `per_layer_config`.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Config`], which names the field at fault.
    pub fn from_json(json: &str) -> Result<Self, Gemma4Error> {
        let file: File = json::from_slice(json.as_bytes()).map_err(Gemma4Error::Config)?;
        match file.model_type.as_deref() {
            Some(model_type) if MODEL_TYPES.contains(&model_type) => {}
            Some(other) => {
                refuse_other_model(other)?;
                return Err(Gemma4Error::Config(format!(
                    "model_type is {other:?}; expected one of {MODEL_TYPES:?}"
                )));
            }
            None => {
                return Err(Gemma4Error::Config(format!(
                    "model_type is missing; it should be one of {MODEL_TYPES:?}"
                )));
            }
        }
        schemes_of(json)?;
        let mut text: Text = match &file.text_config {
            Some(text) => json::from_field("text_config", text),
            None => json::from_slice(json.as_bytes()),
        }
        .map_err(Gemma4Error::Config)?;
        // A multimodal model's file may have these four fields at the top level instead of in `text_config`.
        text.eos_token_id = file.eos_token_id.or(text.eos_token_id);
        text.dtype = text.dtype.or(file.dtype).or(file.torch_dtype);
        text.rope_scaling = text.rope_scaling.or(file.rope_scaling);
        text.tie_word_embeddings = text.tie_word_embeddings.or(file.tie_word_embeddings);
        if file
            .model_type
            .is_some_and(|kind| kind.starts_with(UNIFIED))
        {
            text.fill_unified_defaults();
        }
        let config = text.into_config()?;
        config.validate()?;
        Ok(config)
    }
}

impl Text {
    /// Fills missing fields with the defaults of Hugging Face Transformers' class for unified models, where they differ
    /// from those of other models. Unified models have no per-layer embeddings.
    fn fill_unified_defaults(&mut self) {
        self.hidden_size_per_layer_input.get_or_insert(0);
        self.sliding_window.get_or_insert(1024);
        self.max_position_embeddings.get_or_insert(262_144);
    }

    /// Sets the dtype of the weights, if the fields have none.
    pub(super) fn fill_dtype(&mut self, dtype: Option<String>) {
        self.dtype = self.dtype.take().or(dtype);
    }

    /// Fills missing fields with the defaults of Hugging Face Transformers' class for embedding models. Returns the
    /// radius of the window, which this class calls `sliding_window`.
    pub(super) fn fill_embedding_defaults(&mut self) -> Result<usize, Gemma4Error> {
        self.hidden_size_per_layer_input.get_or_insert(512);
        self.max_position_embeddings.get_or_insert(262_144);
        // Files on the Hub may give the heads of full layers by two fields of their own. The last layer is full, and
        // all full layers have equal heads.
        if self.per_layer_config.is_none() {
            let last = self.num_hidden_layers.saturating_sub(1).to_string();
            let heads = PerLayer {
                head_dim: Some(self.global_head_dim.unwrap_or(512)),
                num_key_value_heads: Some(self.num_global_key_value_heads.unwrap_or(1)),
            };
            self.per_layer_config = Some(BTreeMap::from([(last, heads)]));
        }
        let kinds = [LayerType::Sliding, LayerType::Full].map(|kind| kind.to_string());
        if self.layer_types.is_none()
            && let Some(period) = self.sliding_window_pattern
        {
            if period == 0 {
                let reason = "sliding_window_pattern is 0; expected a number of layers";
                return Err(Gemma4Error::Config(reason.into()));
            }
            number_of_layers(self.num_hidden_layers)?;
            let layers = 1..=self.num_hidden_layers;
            let names = layers.map(|layer| kinds[usize::from(layer % period == 0)].clone());
            self.layer_types = Some(names.collect());
        }
        match &self.rope_parameters {
            Some(found) => {
                if let Some(kind) = kinds.iter().find(|kind| !found.contains_key(*kind)) {
                    return Err(Gemma4Error::Config(format!(
                        "rope_parameters has no {kind:?}; expected the rotation of both layer types"
                    )));
                }
            }
            None => {
                let rotations = kinds.into_iter().zip([1e4, 1e6]);
                let rotations = rotations.map(|(kind, theta)| (kind, Rope::of(theta)));
                self.rope_parameters = Some(rotations.collect());
            }
        }
        Ok(self.sliding_window.unwrap_or(512))
    }

    /// Converts the fields of the file to a configuration. A missing field gets the default value of Hugging Face
    /// Transformers' configuration class.
    pub(super) fn into_config(self) -> Result<Gemma4Config, Gemma4Error> {
        self.refuse_unsupported()?;
        let layer_types = self.layer_types()?;
        let sliding_head_dim = self.head_dim.unwrap_or(256);
        let attention_k_eq_v = self.attention_k_eq_v.unwrap_or(false);
        let (global_head_dim, per_layer_heads) = self.global_heads(&layer_types)?;
        // Read `num_global_key_value_heads` only if full layers compute V from the output of the K projection. In all
        // other models only `per_layer_config` can set the number of KV heads of full layers.
        let num_global_key_value_heads = match attention_k_eq_v {
            true => self.num_global_key_value_heads.or(per_layer_heads),
            false => per_layer_heads,
        };
        let experts = match self.enable_moe_block.unwrap_or(false) {
            true => Some(ExpertsConfig {
                num_experts: required("num_experts", self.num_experts)?,
                top_k_experts: required("top_k_experts", self.top_k_experts)?,
                moe_intermediate_size: required(
                    "moe_intermediate_size",
                    self.moe_intermediate_size,
                )?,
            }),
            false => None,
        };
        let vocab_size = self.vocab_size.unwrap_or(262_144);
        let config = Gemma4Config {
            vocab_size,
            vocab_size_per_layer_input: self.vocab_size_per_layer_input.unwrap_or(vocab_size),
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            use_double_wide_mlp: self.use_double_wide_mlp.unwrap_or(false),
            num_kv_shared_layers: self.num_kv_shared_layers.unwrap_or(0),
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            num_global_key_value_heads: num_global_key_value_heads
                .unwrap_or(self.num_key_value_heads),
            sliding_head_dim,
            global_head_dim,
            sliding_window: self.sliding_window.unwrap_or(512),
            attention_k_eq_v,
            hidden_size_per_layer_input: self.hidden_size_per_layer_input.unwrap_or(256),
            experts,
            sliding_rope: self.rope("sliding_attention", RopeConfig::SLIDING)?,
            global_rope: self.rope("full_attention", RopeConfig::GLOBAL)?,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            final_logit_softcapping: self.final_logit_softcapping,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(true),
            max_position_embeddings: self.max_position_embeddings.unwrap_or(131_072),
            initializer_range: self.initializer_range.unwrap_or(0.02),
            bos_token: self.bos_token_id.unwrap_or(2),
            pad_token: self.pad_token_id.unwrap_or(0),
            dtype: self.dtype.as_deref().map(dtype).transpose()?,
            layer_types,
            eos_tokens: self.eos_token_id.map_or_else(|| vec![1], Tokens::into_vec),
        };
        Ok(config)
    }

    fn refuse_unsupported(&self) -> Result<(), Gemma4Error> {
        let refuse = |field: &str, value: &str, supported: &str| {
            Err(Gemma4Error::Config(format!(
                "{field} is {value:?}; only {supported} is supported"
            )))
        };
        match self.hidden_activation.as_deref() {
            None | Some("gelu_pytorch_tanh") => {}
            Some(other) => return refuse("hidden_activation", other, "gelu_pytorch_tanh"),
        }
        if self.attention_bias == Some(true) {
            return refuse("attention_bias", "true", "false");
        }
        if let Some(scaling) = self.rope_scaling.as_ref().filter(|one| scales(one)) {
            return Err(Gemma4Error::Config(format!(
                "rope_scaling is {scaling}; only rope_parameters for each layer type is supported"
            )));
        }
        match self.use_bidirectional_attention.as_deref() {
            // Accept the value "vision", which keeps the attention between text tokens causal.
            None | Some("vision") => Ok(()),
            Some(other) => refuse("use_bidirectional_attention", other, "null or \"vision\""),
        }
    }

    fn layer_types(&self) -> Result<Vec<LayerType>, Gemma4Error> {
        let layers = self.num_hidden_layers;
        number_of_layers(layers)?;
        let mut types = match &self.layer_types {
            Some(names) => self.named_layer_types(names)?,
            None => (1..=layers)
                .map(|layer| match layer % 6 == 0 {
                    true => LayerType::Full,
                    false => LayerType::Sliding,
                })
                .collect(),
        };
        // The last layer is always a full layer, whatever the file says. Hugging Face Transformers does the same.
        if let Some(last) = types.last_mut() {
            *last = LayerType::Full;
        }
        Ok(types)
    }

    fn named_layer_types(&self, names: &[String]) -> Result<Vec<LayerType>, Gemma4Error> {
        let layers = self.num_hidden_layers;
        if names.len() != layers {
            return Err(Gemma4Error::Config(format!(
                "layer_types has {} entries, but num_hidden_layers is {layers}",
                names.len()
            )));
        }
        names
            .iter()
            .map(|name| match name.as_str() {
                "sliding_attention" => Ok(LayerType::Sliding),
                "full_attention" => Ok(LayerType::Full),
                other => Err(Gemma4Error::Config(format!(
                    "layer_types has {other:?}; expected \"sliding_attention\" or \"full_attention\""
                ))),
            })
            .collect()
    }

    /// Returns the head size and the number of KV heads of full layers. The number of KV heads is `None` if
    /// `per_layer_config` does not give it.
    fn global_heads(
        &self,
        layer_types: &[LayerType],
    ) -> Result<(usize, Option<usize>), Gemma4Error> {
        let Some(layers) = &self.per_layer_config else {
            return Ok((self.global_head_dim.unwrap_or(512), None));
        };
        let inconsistent =
            |reason: String| Gemma4Error::Config(format!("per_layer_config: {reason}"));
        let mut global: Option<&PerLayer> = None;
        for (name, layer) in layers {
            let index: usize = name
                .parse()
                .map_err(|_| inconsistent(format!("{name:?} is not the number of a layer")))?;
            match layer_types.get(index) {
                Some(LayerType::Full) => {}
                Some(LayerType::Sliding) => {
                    return Err(inconsistent(format!(
                        "layer {index} is sliding; only full layers may differ"
                    )));
                }
                None => return Err(inconsistent(format!("there is no layer {index}"))),
            }
            let first = *global.get_or_insert(layer);
            if (first.head_dim, first.num_key_value_heads)
                != (layer.head_dim, layer.num_key_value_heads)
            {
                return Err(inconsistent("full layers differ from one another".into()));
            }
        }
        let head_dim = global
            .and_then(|layer| layer.head_dim)
            .or(self.global_head_dim)
            .or(self.head_dim)
            .unwrap_or(256);
        Ok((head_dim, global.and_then(|layer| layer.num_key_value_heads)))
    }

    fn rope(&self, kind: &str, default: RopeConfig) -> Result<RopeConfig, Gemma4Error> {
        let kinds = self.rope_parameters.as_ref();
        match kinds.and_then(|kinds| kinds.get(kind)) {
            Some(rope) => rope.config(kind, default),
            None => Ok(default),
        }
    }
}

fn required(field: &str, value: Option<usize>) -> Result<usize, Gemma4Error> {
    value.ok_or_else(|| {
        Gemma4Error::Config(format!("{field} is missing, but enable_moe_block is true"))
    })
}

fn dtype(name: &str) -> Result<DType, Gemma4Error> {
    match name {
        "float32" => Ok(DType::F32),
        "float16" => Ok(DType::F16),
        "bfloat16" => Ok(DType::BF16),
        other => Err(Gemma4Error::Config(format!(
            "dtype is {other:?}; expected float32, float16 or bfloat16"
        ))),
    }
}
