//! The transformer encoder of `burn-nn` with fused attention.

use super::attention::MultiHeadAttention;
use super::cache::{MhaCache, TokenCache};
use super::input::{Masks, MhaInput, TransformerEncoderInput};
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::nn::transformer::{
    PositionWiseFeedForward, TransformerEncoder, TransformerEncoderConfig, TransformerEncoderLayer,
};
use burn::nn::{Dropout, LayerNorm};
use burn::tensor::{Bool, Device, Tensor};

/// A transformer encoder layer that computes fused attention. The layer has the fields and records of
/// [`burn::nn::transformer::TransformerEncoderLayer`].
///
/// The layer differs from `burn-nn`'s layer only by its [`MultiHeadAttention`].
#[derive(Module, Debug)]
pub struct FusedTransformerEncoderLayer {
    /// The self-attention.
    pub mha: MultiHeadAttention,
    /// The position-wise feed-forward network.
    pub pwff: PositionWiseFeedForward,
    /// The layer normalization before the feed-forward network.
    pub norm_1: LayerNorm,
    /// The layer normalization before the attention, or after the feed-forward network if `norm_first` is false.
    pub norm_2: LayerNorm,
    /// The dropout of the attention's output and of the feed-forward network's output.
    pub dropout: Dropout,
    /// True if layer normalization precedes the attention and the feed-forward network. False if layer normalization
    /// follows each of the two.
    pub norm_first: bool,
}

impl From<TransformerEncoderLayer> for FusedTransformerEncoderLayer {
    fn from(layer: TransformerEncoderLayer) -> Self {
        Self {
            mha: layer.mha.into(),
            pwff: layer.pwff,
            norm_1: layer.norm_1,
            norm_2: layer.norm_2,
            dropout: layer.dropout,
            norm_first: layer.norm_first,
        }
    }
}

impl From<FusedTransformerEncoderLayer> for TransformerEncoderLayer {
    fn from(layer: FusedTransformerEncoderLayer) -> Self {
        Self {
            mha: layer.mha.into(),
            pwff: layer.pwff,
            norm_1: layer.norm_1,
            norm_2: layer.norm_2,
            dropout: layer.dropout,
            norm_first: layer.norm_first,
        }
    }
}

impl FusedTransformerEncoderLayer {
    /// Creates the layer that `config` describes, with new parameters on `device`.
    pub fn new(config: &TransformerEncoderConfig, device: &Device) -> Self {
        TransformerEncoderLayer::new(config, device).into()
    }

    /// Computes the layer. In the masks, `true` hides a token.
    ///
    /// # Shapes
    /// `input [batch, length, d_model]`, `mask_pad [batch, length]`, `mask_attn [batch, length, length]` →
    /// `[batch, length, d_model]`.
    ///
    /// # Panics
    /// Panics like [`MultiHeadAttention::forward`].
    pub fn forward(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
    ) -> Tensor<3> {
        let masks = Masks {
            pad: mask_pad,
            attn: mask_attn,
            causal: false,
        };
        self.compute(input, masks, None)
    }

    /// Computes the layer with a causal mask that needs no mask tensor.
    ///
    /// # Shapes
    /// `input [batch, length, d_model]`, `mask_pad [batch, length]` → `[batch, length, d_model]`.
    ///
    /// # Panics
    /// Panics like [`MultiHeadAttention::forward`].
    pub fn forward_causal(&self, input: Tensor<3>, mask_pad: Option<Tensor<2, Bool>>) -> Tensor<3> {
        let masks = Masks {
            pad: mask_pad,
            attn: None,
            causal: true,
        };
        self.compute(input, masks, None)
    }

    /// Computes the layer with a cache, with the semantics of [`MultiHeadAttention::forward_cache`].
    ///
    /// # Shapes
    /// `input [batch, length, d_model]`, `mask_pad [batch, length]`, `mask_attn [batch, length, length]` →
    /// `[batch, length, d_model]`.
    ///
    /// # Panics
    /// Panics like [`MultiHeadAttention::forward_cache`].
    pub fn forward_autoregressive_inference(
        &self,
        input: Tensor<3>,
        mask_pad: Option<Tensor<2, Bool>>,
        mask_attn: Option<Tensor<3, Bool>>,
        cache: &mut FusedTransformerEncoderLayerCache,
    ) -> Tensor<3> {
        let masks = Masks {
            pad: mask_pad,
            attn: mask_attn,
            causal: false,
        };
        self.compute(input, masks, Some(cache))
    }

    fn compute(
        &self,
        input: Tensor<3>,
        masks: Masks,
        mut cache: Option<&mut FusedTransformerEncoderLayerCache>,
    ) -> Tensor<3> {
        let norm_1 = |rows: Tensor<3>| self.norm_1.forward(rows);
        let norm_2 = |rows: Tensor<3>| self.norm_2.forward(rows);
        let mut x = input;

        let rows = match self.norm_first {
            true => {
                let cache = cache.as_deref_mut().map(|cache| &mut cache.norm_2);
                forward_tokens(cache, x.clone(), norm_2)
            }
            false => x.clone(),
        };
        let input = MhaInput {
            masks,
            ..MhaInput::self_attn(rows)
        };
        let context = match cache.as_deref_mut() {
            Some(cache) => self.mha.forward_cache(input, &mut cache.mha),
            None => self.mha.forward(input),
        };
        x = x + self.dropout.forward(context);

        let normalized = {
            let cache = cache.as_deref_mut().map(|cache| &mut cache.norm_1);
            forward_tokens(cache, x.clone(), norm_1)
        };
        if !self.norm_first {
            x = normalized.clone();
        }
        let rows = {
            let cache = cache.as_deref_mut().map(|cache| &mut cache.pwff);
            forward_tokens(cache, normalized, |rows| self.pwff.forward(rows))
        };
        x = x + self.dropout.forward(rows);

        match self.norm_first {
            true => x,
            false => forward_tokens(cache.map(|cache| &mut cache.norm_2), x, norm_2),
        }
    }
}

/// Computes a layer that treats each token independently of the other tokens. If `cache` is present, the function uses
/// the cached output of earlier tokens.
fn forward_tokens(
    cache: Option<&mut TokenCache>,
    input: Tensor<3>,
    layer: impl Fn(Tensor<3>) -> Tensor<3>,
) -> Tensor<3> {
    match cache {
        Some(cache) => cache.forward(input, layer),
        None => layer(input),
    }
}

/// The cache of [`FusedTransformerEncoderLayer::forward_autoregressive_inference`].
#[derive(Clone, Debug)]
pub struct FusedTransformerEncoderLayerCache {
    mha: MhaCache,
    pwff: TokenCache,
    norm_1: TokenCache,
    norm_2: TokenCache,
}

impl FusedTransformerEncoderLayerCache {
    /// Creates an empty cache.
    pub fn empty() -> Self {
        Self {
            mha: MhaCache::autoregressive(),
            pwff: TokenCache::default(),
            norm_1: TokenCache::default(),
            norm_2: TokenCache::default(),
        }
    }
}

/// A transformer encoder that computes fused attention. The encoder has the fields and records of
/// [`burn::nn::transformer::TransformerEncoder`]. Its layers are [`FusedTransformerEncoderLayer`]s.
///
/// ```
/// use attention_cube::nn::{FusedTransformerEncoder, TransformerEncoderInput};
/// use burn::nn::transformer::TransformerEncoderConfig;
/// use burn::tensor::{Device, Distribution, Tensor};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let unfused = TransformerEncoderConfig::new(32, 64, 4, 2).with_dropout(0.0).init(&device);
/// let encoder = FusedTransformerEncoder::from(unfused); // the same parameters
/// let x = Tensor::<3>::random([2, 10, 32], Distribution::Default, &device);
/// let output = encoder.forward(TransformerEncoderInput::new(x).causal());
/// assert_eq!(output.dims(), [2, 10, 32]);
/// # }
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct FusedTransformerEncoder {
    /// The layers.
    pub layers: Vec<FusedTransformerEncoderLayer>,
    /// The number of features of input and output.
    pub d_model: usize,
    /// The number of hidden features of the feed-forward networks.
    pub d_ff: usize,
    /// The number of attention heads.
    pub n_heads: usize,
    /// The number of layers.
    pub n_layers: usize,
    /// The dropout probability.
    pub dropout: f64,
    /// True if layer normalization precedes the attention and the feed-forward network. False if layer normalization
    /// follows each of the two.
    pub norm_first: bool,
    /// True if the attention uses the quiet softmax, `exp(x_i) / (1 + sum_j(exp(x_j)))`.
    pub quiet_softmax: bool,
}

impl ModuleDisplay for FusedTransformerEncoder {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("d_ff", &self.d_ff)
            .add("n_heads", &self.n_heads)
            .add("n_layers", &self.n_layers)
            .add("dropout", &self.dropout)
            .add("norm_first", &self.norm_first)
            .add("quiet_softmax", &self.quiet_softmax)
            .optional()
    }
}

impl From<TransformerEncoder> for FusedTransformerEncoder {
    fn from(encoder: TransformerEncoder) -> Self {
        Self {
            layers: encoder.layers.into_iter().map(Into::into).collect(),
            d_model: encoder.d_model,
            d_ff: encoder.d_ff,
            n_heads: encoder.n_heads,
            n_layers: encoder.n_layers,
            dropout: encoder.dropout,
            norm_first: encoder.norm_first,
            quiet_softmax: encoder.quiet_softmax,
        }
    }
}

impl From<FusedTransformerEncoder> for TransformerEncoder {
    fn from(encoder: FusedTransformerEncoder) -> Self {
        Self {
            layers: encoder.layers.into_iter().map(Into::into).collect(),
            d_model: encoder.d_model,
            d_ff: encoder.d_ff,
            n_heads: encoder.n_heads,
            n_layers: encoder.n_layers,
            dropout: encoder.dropout,
            norm_first: encoder.norm_first,
            quiet_softmax: encoder.quiet_softmax,
        }
    }
}

impl FusedTransformerEncoder {
    /// Creates the encoder that `config` describes, with new parameters on `device`.
    pub fn new(config: &TransformerEncoderConfig, device: &Device) -> Self {
        config.init(device).into()
    }

    /// Computes all layers.
    ///
    /// # Shapes
    /// `tensor [batch, length, d_model]` → `[batch, length, d_model]`.
    ///
    /// # Panics
    /// Panics like [`MultiHeadAttention::forward`].
    pub fn forward(&self, input: TransformerEncoderInput) -> Tensor<3> {
        let TransformerEncoderInput { tensor, masks } = input;
        let layers = self.layers.iter();
        layers.fold(tensor, |x, layer| layer.compute(x, masks.clone(), None))
    }

    /// Computes all layers with a cache, with the semantics of [`MultiHeadAttention::forward_cache`].
    ///
    /// # Shapes
    /// `tensor [batch, length, d_model]` → `[batch, length, d_model]`.
    ///
    /// # Panics
    /// Panics like [`MultiHeadAttention::forward_cache`], or if the cache was created for an encoder with another
    /// number of layers.
    pub fn forward_autoregressive_inference(
        &self,
        input: TransformerEncoderInput,
        cache: &mut FusedTransformerEncoderCache,
    ) -> Tensor<3> {
        let (layers, cached) = (self.layers.len(), cache.layers.len());
        assert!(
            layers == cached,
            "cache: has `{cached}` layers; expected `{layers}`, the number of the encoder's layers"
        );
        let TransformerEncoderInput { tensor, masks } = input;
        let layers = self.layers.iter().zip(&mut cache.layers);
        layers.fold(tensor, |x, (layer, cache)| {
            layer.compute(x, masks.clone(), Some(cache))
        })
    }

    /// Creates an empty cache for this encoder.
    pub fn new_autoregressive_cache(&self) -> FusedTransformerEncoderCache {
        let layers = self.layers.iter();
        FusedTransformerEncoderCache {
            layers: layers
                .map(|_| FusedTransformerEncoderLayerCache::empty())
                .collect(),
        }
    }
}

/// The cache of [`FusedTransformerEncoder::forward_autoregressive_inference`].
#[derive(Clone, Debug)]
pub struct FusedTransformerEncoderCache {
    layers: Vec<FusedTransformerEncoderLayerCache>,
}
