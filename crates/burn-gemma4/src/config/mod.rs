//! The configuration of a Gemma 4 text model.

pub(crate) mod audio;
pub(crate) mod drafter;
pub(crate) mod embedding_gemma;
pub(crate) mod generation;
mod json;
pub(crate) mod mobile;
mod multimodal;
pub(crate) mod placeholders;
mod presets;
pub(crate) mod quantization;
pub(crate) mod sampling;
pub(crate) mod sentence_transformers;
pub(crate) mod unknown_files;
mod unknown_models;
pub(crate) mod unsupported;
pub(crate) mod validate;
pub(crate) mod vision;
mod write;

pub(crate) use json::Tokens;
pub(crate) use write::name_of;

use crate::error::Gemma4Error;
use burn::tensor::DType;

/// The configuration of a Gemma 4 text model.
///
/// The presets ([`e2b`](Self::e2b), …) return the configurations of the published models. [`from_file`](Self::from_file)
/// and [`from_json`](Self::from_json) read the configuration of a checkpoint.
///
/// ```
/// use burn_gemma4::{Gemma4Config, LayerType};
///
/// let config = Gemma4Config::e2b();
/// assert_eq!(config.layer_types[4], LayerType::Full);
/// assert_eq!(config.head_dim(4), 512);
/// assert_eq!(config.key_value_source(34), 14);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma4Config {
    /// The number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// The number of tokens in the vocabulary that have per-layer embeddings.
    pub vocab_size_per_layer_input: usize,
    /// The width of the residual stream.
    pub hidden_size: usize,
    /// The hidden size of the dense feed-forward network.
    pub intermediate_size: usize,
    /// True if the feed-forward networks of some layers have twice the width `intermediate_size`. These are the layers
    /// that share an earlier layer's KV cache.
    pub use_double_wide_mlp: bool,
    /// The attention type of each layer. The list has one element per layer.
    pub layer_types: Vec<LayerType>,
    /// The number of layers at the end of the model that share an earlier layer's KV cache.
    pub num_kv_shared_layers: usize,
    /// The number of query heads.
    pub num_attention_heads: usize,
    /// The number of KV heads of sliding layers.
    pub num_key_value_heads: usize,
    /// The number of KV heads of full layers.
    pub num_global_key_value_heads: usize,
    /// The head size of sliding layers.
    pub sliding_head_dim: usize,
    /// The head size of full layers.
    pub global_head_dim: usize,
    /// The number of keys that a query in a sliding layer sees, including the key of its own position.
    pub sliding_window: usize,
    /// True if full layers have no V projection and compute V from the output of the K projection.
    pub attention_k_eq_v: bool,
    /// The number of channels of a token's per-layer embedding (PLE) in each layer, or 0 if the model has no PLE.
    pub hidden_size_per_layer_input: usize,
    /// The mixture of experts that runs beside the dense feed-forward network, or `None` if the model has no experts.
    pub experts: Option<ExpertsConfig>,
    /// The rotary embedding of sliding layers.
    pub sliding_rope: RopeConfig,
    /// The rotary embedding of full layers.
    pub global_rope: RopeConfig,
    /// The epsilon that every RMS norm adds to the mean square.
    pub rms_norm_eps: f64,
    /// The softcap `c`, which turns the final logits into `c · tanh(logits / c)`, or `None` if the logits are not capped.
    pub final_logit_softcapping: Option<f64>,
    /// True if the output projection shares the weights of the embedding table.
    pub tie_word_embeddings: bool,
    /// The number of positions that the model was trained for.
    pub max_position_embeddings: usize,
    /// The standard deviation of randomly initialized weights.
    pub initializer_range: f64,
    /// The token at the beginning of every text.
    pub bos_token: u32,
    /// The tokens that end a text.
    pub eos_tokens: Vec<u32>,
    /// The padding token.
    pub pad_token: u32,
    /// The dtype of the weights according to the checkpoint's configuration, or `None` if the configuration gives no dtype.
    pub dtype: Option<DType>,
}

/// The attention type of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerType {
    /// A query sees the keys of the last [`Gemma4Config::sliding_window`] positions, up to and including the query's
    /// own position.
    Sliding,
    /// A query sees the keys of all positions up to and including the query's own position.
    Full,
}

/// A mixture of experts. For each token, a router selects a few of many small feed-forward networks.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// The number of experts.
    pub num_experts: usize,
    /// The number of experts that the router selects for each token.
    pub top_k_experts: usize,
    /// The hidden size of each expert.
    pub moe_intermediate_size: usize,
}

/// The rotary embedding (RoPE), which rotates the channels `j` and `j + head_dim / 2` as a pair. The angle in radians
/// is `position · theta^(-2j / head_dim) / factor`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the rotation frequencies, called `theta` in the formula.
    pub theta: f64,
    /// The fraction of a head's channel pairs that are rotated. The rotated pairs are those with the lowest indices.
    pub partial_rotary_factor: f64,
    /// The number by which all positions are divided.
    pub factor: f64,
}

impl RopeConfig {
    /// Returns the number of rotated channel pairs in a head.
    pub fn rotated_pairs(&self, head_dim: usize) -> usize {
        (self.partial_rotary_factor * head_dim as f64 / 2.0) as usize
    }

    /// Returns, for each channel pair, the angle between the rotations at two neighboring positions, in radians. The
    /// list has `head_dim / 2` values.
    ///
    /// The f32 operations have the same order as in Hugging Face Transformers, because the checkpoints were trained
    /// with the rounding errors of that order.
    pub(crate) fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let rotated = self.rotated_pairs(head_dim);
        (0..head_dim / 2)
            .map(|pair| match pair < rotated {
                true => {
                    let exponent = (2 * pair) as f32 / head_dim as f32;
                    1.0 / (self.theta as f32).powf(exponent) / self.factor as f32
                }
                false => 0.0,
            })
            .collect()
    }
}

impl Gemma4Config {
    /// Returns the number of layers.
    pub fn num_layers(&self) -> usize {
        self.layer_types.len()
    }

    /// Returns the index of the first layer that shares an earlier layer's KV cache, or the number of layers if none
    /// does.
    pub fn first_shared_layer(&self) -> usize {
        self.num_layers() - self.num_kv_shared_layers
    }

    /// True if `layer` shares an earlier layer's KV cache.
    pub fn is_shared(&self, layer: usize) -> bool {
        layer >= self.first_shared_layer()
    }

    /// Returns the index of the layer whose KV cache `layer` reads. If `layer` has a KV cache of its own, this is
    /// `layer` itself. Otherwise this is the last layer of the same type that has a KV cache of its own.
    ///
    /// # Panics
    /// Panics if the model has no layer with this index.
    pub fn key_value_source(&self, layer: usize) -> usize {
        if !self.is_shared(layer) {
            return layer;
        }
        self.layer_types[..self.first_shared_layer()]
            .iter()
            .rposition(|kind| *kind == self.layer_types[layer])
            .expect("validated: every shared layer has a layer to read from")
    }

    /// Returns the head size of `layer`.
    pub fn head_dim(&self, layer: usize) -> usize {
        match self.layer_types[layer] {
            LayerType::Sliding => self.sliding_head_dim,
            LayerType::Full => self.global_head_dim,
        }
    }

    /// Returns the number of KV heads of `layer`.
    pub fn key_value_heads(&self, layer: usize) -> usize {
        match self.layer_types[layer] {
            LayerType::Sliding => self.num_key_value_heads,
            LayerType::Full => self.num_global_key_value_heads,
        }
    }

    /// True if `layer` has no V projection and computes V from the output of the K projection.
    pub fn values_are_keys(&self, layer: usize) -> bool {
        self.attention_k_eq_v && self.layer_types[layer] == LayerType::Full
    }

    /// Returns the hidden size of the dense feed-forward network of `layer`.
    pub fn intermediate_size(&self, layer: usize) -> usize {
        match self.use_double_wide_mlp && self.is_shared(layer) {
            true => 2 * self.intermediate_size,
            false => self.intermediate_size,
        }
    }

    /// True if the model has per-layer embeddings (PLE).
    pub fn has_per_layer_embeddings(&self) -> bool {
        self.hidden_size_per_layer_input > 0
    }

    /// Refuses tokens outside the vocabulary, which have no row in the embedding table.
    pub(crate) fn check_tokens(
        &self,
        tokens: impl IntoIterator<Item = i64>,
    ) -> Result<(), Gemma4Error> {
        let vocabulary = 0..self.vocab_size as i64;
        match tokens.into_iter().find(|token| !vocabulary.contains(token)) {
            Some(token) => Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!(
                    "has the token {token}, but the vocabulary has {} tokens",
                    self.vocab_size
                ),
            }),
            None => Ok(()),
        }
    }
}

impl std::fmt::Display for LayerType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sliding => "sliding_attention",
            Self::Full => "full_attention",
        })
    }
}
