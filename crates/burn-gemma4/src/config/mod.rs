//! The shape of a Gemma 4 text model.

pub(crate) mod drafter;

mod foreign;
mod json;
mod presets;
pub(crate) mod quantization;
pub(crate) mod validate;
mod write;

pub(crate) use json::Tokens;
pub(crate) use write::name_of;

use crate::Gemma4Error;
use burn::tensor::DType;

/// The shape of a Gemma 4 text model, by the names of its `config.json`.
///
/// The presets ([`e2b`](Self::e2b), …) are the published models; [`from_file`](Self::from_file) and
/// [`from_json`](Self::from_json) read a checkpoint's.
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
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
    /// Tokens that have per-layer embeddings.
    pub vocab_size_per_layer_input: usize,
    /// Columns of the residual stream.
    pub hidden_size: usize,
    /// Columns inside the dense feed-forward network.
    pub intermediate_size: usize,
    /// Layers whose keys and values are an earlier layer's have twice [`Self::intermediate_size`].
    pub use_double_wide_mlp: bool,
    /// What each layer attends to; its length is the number of layers.
    pub layer_types: Vec<LayerType>,
    /// How many of the last layers read an earlier layer's keys and values.
    pub num_kv_shared_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads of sliding layers.
    pub num_key_value_heads: usize,
    /// Key and value heads of full layers.
    pub num_global_key_value_heads: usize,
    /// Columns of a head in sliding layers.
    pub sliding_head_dim: usize,
    /// Columns of a head in full layers.
    pub global_head_dim: usize,
    /// Keys that a query of a sliding layer sees, its own included.
    pub sliding_window: usize,
    /// Full layers make values of what their keys are made of.
    pub attention_k_eq_v: bool,
    /// Columns of a per-layer embedding (PLE), which each layer has of each token; 0 for none.
    pub hidden_size_per_layer_input: usize,
    /// The mixture of experts beside the dense network.
    pub experts: Option<ExpertsConfig>,
    /// Rotary positions of sliding layers.
    pub sliding_rope: RopeConfig,
    /// Rotary positions of full layers.
    pub global_rope: RopeConfig,
    /// Added to the mean of squares in every norm.
    pub rms_norm_eps: f64,
    /// Logits are `c · tanh(logits / c)`.
    pub final_logit_softcapping: Option<f64>,
    /// The output projection is the embedding's table.
    pub tie_word_embeddings: bool,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// The standard deviation of weights that are drawn at random.
    pub initializer_range: f64,
    /// The token that begins every text.
    pub bos_token: u32,
    /// Tokens that end a text.
    pub eos_tokens: Vec<u32>,
    /// The token that fills up.
    pub pad_token: u32,
    /// The dtype that the checkpoint says it is in.
    pub dtype: Option<DType>,
}

/// What a layer attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerType {
    /// The last [`Gemma4Config::sliding_window`] keys.
    Sliding,
    /// All keys so far.
    Full,
}

/// A mixture of experts: a router chooses a few of many small feed-forward networks for each token.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts.
    pub num_experts: usize,
    /// Experts that a token goes through.
    pub top_k_experts: usize,
    /// Columns inside an expert.
    pub moe_intermediate_size: usize,
}

/// Rotary positions: the pair of channels `j` and `j + head_dim / 2` is rotated by
/// `position · theta^(-2j / head_dim) / factor`.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// The base of the wavelengths.
    pub theta: f64,
    /// The share of the pairs that are rotated, the first ones; the others stay as they are.
    pub partial_rotary_factor: f64,
    /// Positions are divided by it.
    pub factor: f64,
}

impl RopeConfig {
    /// How many of a head's pairs of channels are rotated.
    pub fn rotated_pairs(&self, head_dim: usize) -> usize {
        (self.partial_rotary_factor * head_dim as f64 / 2.0) as usize
    }

    /// Channels are rotated by this many radians a position: `head_dim / 2` numbers, 0 for pairs that stay.
    ///
    /// In f32 and by the same steps as transformers, whose rounding the checkpoints were trained with.
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
    /// How many layers there are.
    pub fn num_layers(&self) -> usize {
        self.layer_types.len()
    }

    /// The first layer that reads an earlier layer's keys and values; the number of layers if none does.
    pub fn first_shared_layer(&self) -> usize {
        self.num_layers() - self.num_kv_shared_layers
    }

    /// Whether `layer` reads an earlier layer's keys and values.
    pub fn is_shared(&self, layer: usize) -> bool {
        layer >= self.first_shared_layer()
    }

    /// The layer whose keys and values `layer` reads: itself, or the last layer of its type that has its own.
    ///
    /// # Panics
    /// For a layer that the model does not have.
    pub fn key_value_source(&self, layer: usize) -> usize {
        if !self.is_shared(layer) {
            return layer;
        }
        self.layer_types[..self.first_shared_layer()]
            .iter()
            .rposition(|kind| *kind == self.layer_types[layer])
            .expect("validated: every shared layer has a layer to read from")
    }

    /// Columns of a head in `layer`.
    pub fn head_dim(&self, layer: usize) -> usize {
        match self.layer_types[layer] {
            LayerType::Sliding => self.sliding_head_dim,
            LayerType::Full => self.global_head_dim,
        }
    }

    /// Key and value heads of `layer`.
    pub fn key_value_heads(&self, layer: usize) -> usize {
        match self.layer_types[layer] {
            LayerType::Sliding => self.num_key_value_heads,
            LayerType::Full => self.num_global_key_value_heads,
        }
    }

    /// Whether `layer` makes its values of what its keys are made of.
    pub fn values_are_keys(&self, layer: usize) -> bool {
        self.attention_k_eq_v && self.layer_types[layer] == LayerType::Full
    }

    /// Columns inside the dense feed-forward network of `layer`.
    pub fn intermediate_size(&self, layer: usize) -> usize {
        match self.use_double_wide_mlp && self.is_shared(layer) {
            true => 2 * self.intermediate_size,
            false => self.intermediate_size,
        }
    }

    /// Whether there are per-layer embeddings (PLE).
    pub fn has_per_layer_embeddings(&self) -> bool {
        self.hidden_size_per_layer_input > 0
    }

    /// Refuses tokens that the vocabulary does not have, and that no table has a row for.
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
