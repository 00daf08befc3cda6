//! The model: tokens to logits.

pub mod layer;
pub mod observe;

pub(crate) mod any_rows;
pub(crate) mod cache;
#[cfg(feature = "cube")]
pub(crate) mod few_rows;
#[cfg(feature = "cube")]
mod first_rows;
pub(crate) mod forward;
pub(crate) mod per_layer;
pub(crate) mod weights;

use crate::{
    Gemma4Config, Gemma4Error,
    checkpoint::{HostTable, placement::TablePlacement},
    op::{
        flat_rows,
        linear::{self, Matrix},
        rope::tables::Rope,
    },
};
use burn::{
    module::Module,
    tensor::{DType, Device, Int, Tensor},
};
use cache::{Cache, kind::CacheKind};
#[cfg(feature = "cube")]
use few_rows::FewRows;
use forward::After;
use layer::{DecoderLayer, Embedding, Linear, RmsNorm, Weight};
use observe::Observer;
use per_layer::{SplitTable, Tokens};
use std::sync::Arc;

/// A Gemma 4 text model.
///
/// Its fields have the names of the checkpoint's tensors, so that a parameter's path is its name in the file.
///
/// # Training
/// [`forward`](Self::forward) is differentiable through Burn's autodiff, and so is
/// [`forward_packed`](Self::forward_packed), which reads several documents in a row:
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_gemma4::{Gemma4Config, Gemma4Model, LayerType};
///
/// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
/// let config = Gemma4Config {
///     vocab_size: 100,
///     hidden_size: 32,
///     intermediate_size: 64,
///     layer_types: vec![LayerType::Sliding, LayerType::Full],
///     num_attention_heads: 2,
///     sliding_head_dim: 16,
///     global_head_dim: 32,
///     num_kv_shared_layers: 0,
///     hidden_size_per_layer_input: 0,
///     ..Gemma4Config::e2b()
/// };
/// let device = Device::flex().autodiff();
/// let model = Gemma4Model::new(&config, &device);
/// let tokens = Tensor::<2, Int>::from_data([[2, 17, 5, 44]], &device);
/// let logits = model.forward(tokens)?; // [1, 4, 100]
/// let next = Tensor::<3, Int>::from_data([[[17], [5], [44], [1]]], &device);
/// let loss = -burn::tensor::activation::log_softmax(logits, 2).gather(2, next).mean();
/// let gradients = loss.backward();
/// assert!(model.norm.weight.val().grad(&gradients).is_some());
/// # Ok(())
/// # }
/// ```
///
/// With a vocabulary such as Gemma's, logits are the largest tensors by far: [`loss`](Self::loss) of
/// [`hidden`](Self::hidden) does without them.
#[derive(Module, Debug)]
pub struct Gemma4Model {
    /// Tokens to the residual stream, and back to logits.
    pub embed_tokens: Embedding,
    /// Tokens to their part of the per-layer embeddings (PLE), where that is a parameter: see
    /// [`PerLayerTable`](crate::PerLayerTable).
    pub embed_tokens_per_layer: Option<Embedding>,
    /// The same in several buffers.
    pub(crate) split_table: Option<SplitTable>,
    /// The same in the checkpoint's files.
    #[module(skip)]
    pub(crate) host_table: Option<HostTable>,
    #[module(skip)]
    pub(crate) placement: Option<TablePlacement>,
    /// Settings that were read and have no effect.
    #[module(skip)]
    pub(crate) warnings: Vec<String>,
    /// The dtype that the checkpoint is written in.
    #[module(skip)]
    pub(crate) written: Option<DType>,
    /// The scaled embeddings to their part of them.
    pub per_layer_model_projection: Option<Linear>,
    /// Of the projection.
    pub per_layer_projection_norm: Option<RmsNorm>,
    /// The layers.
    pub layers: Vec<DecoderLayer>,
    /// Before the logits.
    pub norm: RmsNorm,
    /// To logits, where that is not the embedding's table.
    pub lm_head: Option<Linear>,
    /// Whether the backward of an adapter multiplies what is inside the dense networks anew.
    #[module(skip)]
    pub(crate) mlp_anew: bool,
    #[module(skip)]
    pub(crate) config: Arc<Gemma4Config>,
    #[module(skip)]
    pub(crate) rope: Rope,
}

/// The positions whose logits are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Every position.
    All,
    /// The last positions, this many.
    Last(usize),
    /// None: the call only fills the cache.
    None,
}

impl Logits {
    pub(crate) fn of(self, positions: usize) -> usize {
        match self {
            Self::All => positions,
            Self::Last(count) => count.min(positions),
            Self::None => 0,
        }
    }
}

impl Gemma4Model {
    /// A model with random weights, drawn when they are first used, in the device's default dtype.
    ///
    /// # Panics
    /// If the configuration is not [valid](Gemma4Config::validate).
    pub fn new(config: &Gemma4Config, device: &Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        Self::of(config, device)
    }

    /// Settings of its files that are not computed, one sentence each, for people to read.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// [`new`](Self::new) of a configuration that has been validated, if only as a part of another model's.
    pub(crate) fn of(config: &Gemma4Config, device: &Device) -> Self {
        let (hidden, columns) = (config.hidden_size, config.hidden_size_per_layer_input);
        let layers = config.num_layers();
        let deviation = config.initializer_range;
        let per_layer_embeddings = config.has_per_layer_embeddings();
        Self {
            embed_tokens: Embedding::new(
                config.vocab_size,
                hidden,
                (hidden as f64).sqrt(),
                deviation,
                device,
            ),
            embed_tokens_per_layer: per_layer_embeddings.then(|| {
                Embedding::new(
                    config.vocab_size_per_layer_input,
                    layers * columns,
                    (columns as f64).sqrt(),
                    deviation,
                    device,
                )
            }),
            split_table: None,
            host_table: None,
            placement: None,
            warnings: Vec::new(),
            written: None,
            per_layer_model_projection: per_layer_embeddings
                .then(|| Linear::new(hidden, layers * columns, deviation, device)),
            per_layer_projection_norm: per_layer_embeddings
                .then(|| RmsNorm::new(columns, config.rms_norm_eps, device)),
            layers: (0..layers)
                .map(|layer| DecoderLayer::new(config, layer, device))
                .collect(),
            norm: RmsNorm::new(hidden, config.rms_norm_eps, device),
            lm_head: (!config.tie_word_embeddings)
                .then(|| Linear::new(hidden, config.vocab_size, deviation, device)),
            rope: Rope::new(config),
            mlp_anew: false,
            config: Arc::new(config.clone()),
        }
    }

    /// The model's shape.
    pub fn config(&self) -> &Gemma4Config {
        &self.config
    }

    /// The dtype that the model computes in: that of its weights.
    pub fn dtype(&self) -> DType {
        self.embed_tokens.weight.dtype()
    }

    /// The device of its weights.
    pub fn device(&self) -> Device {
        self.embed_tokens.weight.device()
    }

    /// The logits of every position, `[batch, positions]` to `[batch, positions, vocabulary]`. Position `i` sees the
    /// tokens `..= i`.
    ///
    /// # Errors
    /// Where a token is outside the vocabulary: tokens are read back to the host, which waits for what computes them.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Result<Tensor<3>, Gemma4Error> {
        self.forward_observed(tokens, &mut ())
    }

    /// [`forward`](Self::forward) with a look at what is computed on the way.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn forward_observed(
        &self,
        tokens: Tensor<2, Int>,
        observer: &mut impl Observer,
    ) -> Result<Tensor<3>, Gemma4Error> {
        let tokens = self.read_tokens(tokens)?;
        let hidden = self.hidden_states(self.whole_text(&tokens), None, Logits::All, observer);
        Ok(self.logits(hidden))
    }

    /// What the logits asked for are made of, `[batch, positions]` to `[batch, asked, hidden]`, normalised:
    /// [`forward`](Self::forward) before the head. [`loss`](Self::loss) takes it.
    ///
    /// Layers that read an earlier layer's keys and values are computed for the positions asked for only.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn hidden(&self, tokens: Tensor<2, Int>, asked: Logits) -> Result<Tensor<3>, Gemma4Error> {
        let [_, positions] = tokens.dims();
        let asked_positions = asked.of(positions);
        let tokens = self.read_tokens(tokens)?;
        let hidden = self.hidden_states(self.whole_text(&tokens), None, asked, &mut ());
        Ok(hidden.narrow(1, 0, asked_positions))
    }

    /// An empty cache for a batch of sequences, `padding[i]` leading columns of which are padding: what fills a
    /// short prompt up to the length of the longest.
    pub fn cache(&self, padding: Vec<usize>) -> Cache {
        Cache::new(&self.config, padding, CacheKind::default())
    }

    /// A [`cache`](Self::cache) with [compact keys](CacheKind::compact_keys), where layers make their values of what their keys are made of
    /// ([`Gemma4Config::values_are_keys`]).
    pub fn compact_cache(&self, padding: Vec<usize>) -> Cache {
        let kind = CacheKind {
            compact_keys: true,
            ..CacheKind::default()
        };
        Cache::new(&self.config, padding, kind)
    }

    /// A [`cache`](Self::cache) of this kind.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where int8 is asked for, and a head of the model has a part of a word of four numbers.
    pub fn cache_of(&self, kind: CacheKind, padding: Vec<usize>) -> Result<Cache, Gemma4Error> {
        kind.check(&self.config)?;
        Ok(Cache::new(&self.config, padding, kind))
    }

    /// Reads more tokens, `[batch, positions]`, after those in the cache, and gives the logits
    /// asked for, `[batch, asked, vocabulary]`.
    ///
    /// Layers that read an earlier layer's keys and values are computed for those positions only.
    ///
    /// # Errors
    /// Where the batch is not the cache's, and as [`forward`](Self::forward).
    pub fn step(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<Option<Tensor<3>>, Gemma4Error> {
        let tokens = self.read_tokens(tokens)?;
        let hidden = self.step_hidden(&tokens, cache, logits)?;
        Ok(hidden.map(|hidden| self.logits(hidden)))
    }

    /// What the logits of [`step`](Self::step) are made of, `[batch, asked, hidden]`, normalised.
    pub(crate) fn step_hidden(
        &self,
        tokens: &Tokens,
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<Option<Tensor<3>>, Gemma4Error> {
        let [batch, positions] = tokens.ids.dims();
        if batch != cache.batch() {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: format!("has {batch} sequences, but the cache has {}", cache.batch()),
            });
        }
        if positions == 0 {
            return Err(Gemma4Error::Argument {
                argument: "tokens",
                reason: "has no positions".into(),
            });
        }
        #[cfg(feature = "cube")]
        cache.turn_back();
        let after = After {
            positions: cache.positions(positions),
            cache,
        };
        let text = self.text(tokens, &after.positions);
        let hidden = self.hidden_states(text, Some(after), logits, &mut ());
        Ok((logits.of(positions) > 0).then_some(hidden))
    }

    /// `[vocabulary, hidden]`: from the normalised stream to logits.
    pub(crate) fn head(&self) -> Matrix {
        self.head_weight().matrix()
    }

    pub(crate) fn head_weight(&self) -> &Weight<2> {
        match &self.lm_head {
            Some(head) => &head.weight,
            None => &self.embed_tokens.weight,
        }
    }

    /// `[batch, positions, hidden]`, normalised, to logits.
    pub(crate) fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        let [batch, positions, _] = hidden.dims();
        let rows = flat_rows(hidden);
        let cap = self.config.final_logit_softcapping;
        let head = self.head();
        let shape = [batch, positions, self.config.vocab_size];
        #[cfg(feature = "cube")]
        if positions == 1 && FewRows::serve(self, batch) {
            return linear::few_rows::project(rows, head, cap, linear::few_rows::Origin::Computed)
                .reshape(shape);
        }
        let logits = linear::rows(rows, head).reshape(shape);
        match cap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }
}
