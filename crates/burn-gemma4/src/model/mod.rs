//! The model: tokens to logits.

pub(crate) mod cache;
pub mod layer;
pub mod observe;

#[cfg(feature = "cube")]
use crate::generate::decode::{
    self,
    position::{Layers, columns_of_layers},
};
#[cfg(feature = "cube")]
use crate::op::{flat_rows, linear::few_rows};
use crate::{
    Cache, Decoder, Gemma4Config, Gemma4Error, LayerType, Packing,
    op::{
        linear,
        rope::{Positions, Rotation, tables::Rope},
    },
    train::loss::cross_entropy,
};
#[cfg(feature = "cube")]
use burn::tensor::TensorData;
use burn::{
    module::Module,
    tensor::{DType, Device, Int, Tensor},
};
use layer::{
    DecoderLayer, Embedding, Linear, RmsNorm,
    attention::{KeyValues, Visible},
    decoder::Observed,
};
use observe::{LayerSite, Observer, Site};
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
    /// Tokens to their part of the per-layer embeddings (PLE).
    pub embed_tokens_per_layer: Option<Embedding>,
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
            config: Arc::new(config.clone()),
        }
    }

    /// The model's shape.
    pub fn config(&self) -> &Gemma4Config {
        &self.config
    }

    /// The dtype that the model computes in: that of its weights.
    pub fn dtype(&self) -> DType {
        self.embed_tokens.weight.val().dtype()
    }

    /// The device of its weights.
    pub fn device(&self) -> Device {
        self.embed_tokens.weight.val().device()
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
        self.check_tokens(&tokens)?;
        let hidden = self.run(tokens, Context::Whole, Logits::All, observer);
        Ok(self.logits(hidden))
    }

    /// The logits of every position of packed documents, `[batch, positions]` to `[batch, positions, vocabulary]`: each
    /// document's are those that [`forward`](Self::forward) gives it alone. What it gives padding means nothing.
    ///
    /// # Errors
    /// Where the tokens' shape is not the packing's, and as [`forward`](Self::forward).
    pub fn forward_packed(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
    ) -> Result<Tensor<3>, Gemma4Error> {
        Ok(self.logits(self.hidden_packed(tokens, packing)?))
    }

    /// What the logits asked for are made of, `[batch, positions]` to `[batch, asked, hidden]`, normalised:
    /// [`forward`](Self::forward) before the head. [`loss`](Self::loss) takes it.
    ///
    /// Layers that read an earlier layer's keys and values are computed for the positions asked for only.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn hidden(&self, tokens: Tensor<2, Int>, asked: Logits) -> Result<Tensor<3>, Gemma4Error> {
        self.check_tokens(&tokens)?;
        let [_, positions] = tokens.dims();
        let asked_positions = asked.of(positions);
        let hidden = self.run(tokens, Context::Whole, asked, &mut ());
        Ok(hidden.narrow(1, 0, asked_positions))
    }

    /// [`hidden`](Self::hidden) of every position of packed documents: [`forward_packed`](Self::forward_packed) before the
    /// head.
    ///
    /// # Errors
    /// Where the tokens' shape is not the packing's, and as [`forward`](Self::forward).
    pub fn hidden_packed(
        &self,
        tokens: Tensor<2, Int>,
        packing: &Packing,
    ) -> Result<Tensor<3>, Gemma4Error> {
        packing.check(&tokens)?;
        self.check_tokens(&tokens)?;
        Ok(self.run(tokens, Context::Packed(packing), Logits::All, &mut ()))
    }

    /// The mean cross entropy of `targets` `[batch, positions]` where the model is in the states `hidden`
    /// `[batch, positions, hidden]`, as one number in f32; what [`forward`](Self::forward) and a cross entropy give, without
    /// the memory of the logits, forward and backward.
    ///
    /// Negative targets do not count: padding, ends of documents, a prompt. Where none counts, the loss is 0.
    ///
    /// ```
    /// # use burn::tensor::{Device, Int, Tensor};
    /// # use burn_gemma4::{Gemma4Model, LoadOptions, Logits};
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// let device = Device::flex().autodiff();
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
    /// let model = Gemma4Model::load(folder, &device, LoadOptions::new())?;
    /// let tokens = Tensor::<2, Int>::from_data([[2, 17, 5, 44]], &device);
    /// let next = Tensor::<2, Int>::from_data([[17, 5, 44, -1]], &device);
    /// let loss = model.loss(model.hidden(tokens, Logits::All)?, next)?;
    /// assert!(loss.clone().into_scalar::<f32>() > 0.0);
    /// let gradients = loss.backward();
    /// assert!(model.embed_tokens.weight.val().grad(&gradients).is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Where the targets' shape is not that of the states. Targets beyond the vocabulary are not looked for.
    pub fn loss(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>, Gemma4Error> {
        let [batch, positions, columns] = hidden.dims();
        if targets.dims() != [batch, positions] {
            return Err(Gemma4Error::Argument {
                argument: "targets",
                reason: format!(
                    "has the shape {:?}, but the states are of {:?}",
                    targets.dims(),
                    [batch, positions]
                ),
            });
        }
        Ok(cross_entropy(
            hidden.reshape([batch * positions, columns]),
            self.head(),
            targets.reshape([batch * positions]),
            self.config.final_logit_softcapping,
        ))
    }

    /// An empty cache for a batch of sequences, `padding[i]` leading columns of which are padding: what fills a
    /// short prompt up to the length of the longest.
    pub fn cache(&self, padding: Vec<usize>) -> Cache {
        Cache::new(&self.config, padding, false)
    }

    /// A [`cache`](Self::cache) that keeps less, where layers make their values of what their keys are made of
    /// ([`Gemma4Config::values_are_keys`]): of the keys, only the rotated channels. Those layers keep five eighths at
    /// Gemma 4's shapes, and a token reads as much less. It is the same mathematics, rounded elsewhere. Models without such
    /// layers get the cache that they always get.
    pub fn compact_cache(&self, padding: Vec<usize>) -> Cache {
        Cache::new(&self.config, padding, true)
    }

    /// Goes on from a filled cache, a token of every sequence at a time.
    pub fn decoder<'a>(&'a self, cache: &'a mut Cache) -> Decoder<'a> {
        Decoder::new(self, cache)
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
        self.check_tokens(&tokens)?;
        self.step_within(tokens, cache, logits)
    }

    /// [`step`](Self::step) with tokens that the host knows to be in the vocabulary.
    pub(crate) fn step_within(
        &self,
        tokens: Tensor<2, Int>,
        cache: &mut Cache,
        logits: Logits,
    ) -> Result<Option<Tensor<3>>, Gemma4Error> {
        let [batch, positions] = tokens.dims();
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
        let hidden = self.run(tokens, Context::After(cache), logits, &mut ());
        Ok((logits.of(positions) > 0).then(|| self.logits(hidden)))
    }

    /// Refuses tokens outside the vocabulary, and reads them back for that.
    pub(crate) fn check_tokens(&self, tokens: &Tensor<2, Int>) -> Result<(), Gemma4Error> {
        let tokens = tokens.clone().try_into_data().map_err(|error| {
            Gemma4Error::Device(format!("the tokens could not be read: {error}"))
        })?;
        self.config.check_tokens(tokens.iter::<i64>())
    }

    /// The last layer's stream, normalised, of the positions whose logits are asked for.
    fn run<O: Observer>(
        &self,
        tokens: Tensor<2, Int>,
        mut context: Context<'_>,
        logits: Logits,
        observer: &mut O,
    ) -> Tensor<3> {
        let [_, count] = tokens.dims();
        let asked = logits.of(count);
        let device = tokens.device();

        let mut stream = self.embed_tokens.forward(tokens.clone());
        observer.observe(Site::Embedding, || stream.clone());
        let mut inputs = self.per_layer_embeddings(tokens, &stream, linear::project);
        if let Some(inputs) = &inputs {
            observer.observe(Site::PerLayerEmbeddings, || inputs.clone());
        }

        let positions = match &context {
            Context::Whole => Positions::Range { first: 0, count },
            Context::Packed(packing) => packing.rotary_positions(),
            Context::After(cache) => cache.positions(count),
        };
        let rotation = |kind| {
            self.rope
                .rotation(kind, &positions, stream.dtype(), &device)
        };
        let mut sliding = rotation(LayerType::Sliding);
        let mut full = rotation(LayerType::Full);
        let (segments, step) = match &context {
            Context::Whole => (None, None),
            Context::Packed(packing) => (Some(packing.segments(&device)), None),
            Context::After(cache) => (None, Some(cache.step(count, &device))),
        };
        let mut shared = SharedKeyValues::default();

        for (index, layer) in self.layers.iter().enumerate() {
            if index == self.config.first_shared_layer() && asked < count {
                // From here on, positions only read what earlier layers have left.
                if asked == 0 {
                    break;
                }
                #[cfg(feature = "cube")]
                if asked == 1
                    && let (Context::After(cache), Some(step)) = (&mut context, &step)
                    && decode::serves(self, cache.batch())
                {
                    let last = |tensor: Tensor<3>| flat_rows(tensor.narrow(1, count - 1, 1));
                    let inputs =
                        inputs.map(|inputs| columns_of_layers(inputs.narrow(1, count - 1, 1)));
                    let hidden = self.rest_of_last(index, last(stream), inputs, &positions, shared);
                    cache.advance(step);
                    return hidden.unsqueeze_dim(1);
                }
                stream = stream.narrow(1, count - asked, asked);
                inputs = inputs.map(|inputs| inputs.narrow(1, count - asked, asked));
                sliding = sliding.last(asked);
                full = full.last(asked);
            }
            let kind = self.config.layer_types[index];
            let rotation: &Rotation = match kind {
                LayerType::Sliding => &sliding,
                LayerType::Full => &full,
            };
            let mut observed = Observed {
                layer: index,
                observer: &mut *observer,
            };
            let normed = layer.input_layernorm.forward(stream.clone());
            if let Some((key, value)) = layer.self_attn.key_value(&normed, rotation) {
                observed.see(LayerSite::Key, || key.clone());
                observed.see(LayerSite::Value, || value.clone());
                let key_values = match (&mut context, &step) {
                    (Context::After(cache), Some(step)) => {
                        cache.extend(index, &layer.self_attn, key, value, step)
                    }
                    _ => {
                        let visible = Visible {
                            segments: segments.clone(),
                            ..Visible::in_order(kind, self.config.sliding_window)
                        };
                        KeyValues::new(key, value, visible)
                    }
                };
                shared.set(kind, key_values);
            }
            stream = layer.attention(stream, normed, rotation, shared.get(kind), &mut observed);
            let per_layer_embeddings = inputs
                .as_ref()
                .map(|inputs| inputs.clone().narrow(2, index, 1).squeeze_dim(2));
            stream = layer.feed_forward(stream, per_layer_embeddings, &mut observed);
        }
        if let (Context::After(cache), Some(step)) = (context, &step) {
            cache.advance(step);
        }
        if asked == 0 {
            return stream;
        }
        let computed = stream.dims()[1];
        let hidden = self.norm.forward(stream.narrow(1, computed - asked, asked));
        observer.observe(Site::FinalNorm, || hidden.clone());
        hidden
    }

    /// The layers from `first` on, which read earlier ones' keys and values, of each sequence's last position alone, by the
    /// kernels for that: `[batch, hidden]`, normalised for the logits.
    #[cfg(feature = "cube")]
    fn rest_of_last(
        &self,
        first: usize,
        stream: Tensor<2>,
        per_layer_embeddings: Option<Tensor<2>>,
        positions: &Positions,
        mut shared: SharedKeyValues,
    ) -> Tensor<2> {
        let (device, dtype) = (stream.device(), stream.dtype());
        let [batch, _] = stream.dims();
        let last: Vec<i32> = match positions {
            Positions::Range { first, count } => vec![(first + count - 1) as i32; batch],
            Positions::Each(rows) => rows
                .iter()
                .filter_map(|row| row.last())
                .map(|p| *p as i32)
                .collect(),
        };
        let reach = positions.end();
        let tables = |kind| self.rope.tables(kind, reach, dtype, &device);
        let layers = Layers {
            model: self,
            positions: Tensor::from_data(TensorData::new(last, [batch]), (&device, DType::I32)),
            sliding: tables(LayerType::Sliding),
            full: tables(LayerType::Full),
            per_layer_embeddings,
        };
        let norm = &self.layers[first].input_layernorm;
        let normed = norm.forward(stream.clone());
        layers.run(first, stream, normed, &mut shared, None, &mut |_| ())
    }

    /// `[batch, positions, layers, columns]`: what each layer gets of its own, half from the token, half from the
    /// embedding, by `project` times the transpose of a weight.
    pub(crate) fn per_layer_embeddings(
        &self,
        tokens: Tensor<2, Int>,
        stream: &Tensor<3>,
        project: impl FnOnce(Tensor<3>, Tensor<2>) -> Tensor<3>,
    ) -> Option<Tensor<4>> {
        let table = self.embed_tokens_per_layer.as_ref()?;
        let projection = self.per_layer_model_projection.as_ref()?;
        let norm = self.per_layer_projection_norm.as_ref()?;
        let [batch, positions, hidden] = stream.dims();
        let shape = [
            batch,
            positions,
            self.config.num_layers(),
            self.config.hidden_size_per_layer_input,
        ];
        let of_token = table.forward(tokens).reshape(shape);
        // Constants that bf16 does not hold are applied in f32.
        let of_stream = project(stream.clone(), projection.weight.val());
        let of_stream = of_stream.cast(DType::F32) * (hidden as f64).powf(-0.5);
        let of_stream = norm.forward(of_stream.reshape(shape));
        let sum = of_stream + of_token.cast(DType::F32);
        Some((sum * std::f64::consts::FRAC_1_SQRT_2).cast(stream.dtype()))
    }

    /// `[vocabulary, hidden]`: from the normalised stream to logits.
    pub(crate) fn head(&self) -> Tensor<2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => self.embed_tokens.weight.val(),
        }
    }

    /// The tables of rotations.
    #[cfg(feature = "cube")]
    pub(crate) fn rope(&self) -> &Rope {
        &self.rope
    }

    /// `[batch, positions, hidden]`, normalised, to logits.
    fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        #[cfg(feature = "cube")]
        if let [batch, 1, _] = hidden.dims()
            && decode::serves(self, batch)
        {
            let cap = self.config.final_logit_softcapping;
            return few_rows::project(flat_rows(hidden), self.head(), cap).unsqueeze_dim(1);
        }
        let logits = linear::project(hidden, self.head());
        match self.config.final_logit_softcapping {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }
}

/// What the tokens of a call see beside each other.
enum Context<'a> {
    /// Nothing: each row is a whole text.
    Whole,
    /// Nothing, and of each other only their document.
    Packed(&'a Packing),
    /// What the cache holds.
    After(&'a mut Cache),
}

/// The keys and values that layers read: of each type those of the last layer that made its own.
#[derive(Default)]
pub(crate) struct SharedKeyValues {
    sliding: Option<KeyValues>,
    full: Option<KeyValues>,
}

impl SharedKeyValues {
    pub fn set(&mut self, kind: LayerType, key_values: KeyValues) {
        match kind {
            LayerType::Sliding => self.sliding = Some(key_values),
            LayerType::Full => self.full = Some(key_values),
        }
    }

    pub fn get(&self, kind: LayerType) -> &KeyValues {
        match kind {
            LayerType::Sliding => &self.sliding,
            LayerType::Full => &self.full,
        }
        .as_ref()
        .expect("validated: a layer without keys comes after a layer of its type with keys")
    }
}
