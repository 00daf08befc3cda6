//! The drafter (MTP) of a Gemma 4: a few layers that guess its next tokens from its own hidden state, keys and values.
//!
//! It has no keys of its own. All its guesses of a round are made at one position, that of the token after which the model goes on, and
//! each is made of the one before and of the stream that the one before left, which begins with the model's own.

mod head;
#[cfg(feature = "cube")]
mod kernels;

pub use head::MaskedEmbedding;

#[cfg(feature = "cube")]
use crate::model::few_rows::FewRows;
use crate::{
    Cache, DrafterConfig, Gemma4Error, Gemma4Model, LayerType,
    model::{
        any_rows::{AnyRows, Rotations},
        cache::key_values::SharedKeyValues,
        layer::{
            Linear,
            operators::{Columns, Operators, Stream},
        },
    },
    op::flat_rows,
};
use burn::{
    module::Module,
    tensor::{Device, Int, Tensor, TensorData},
};
use std::sync::Arc;

/// A small model that guesses tokens for a large one, on the device that it was loaded on. Its fields have the names of the checkpoint's
/// tensors.
#[derive(Module, Debug)]
pub struct Drafter {
    /// Its layers, and the table of its head: no model alone, having no keys.
    pub(crate) model: Gemma4Model,
    /// A token's embedding and the stream before it, both of the large model's width, to its own stream.
    pub pre_projection: Linear,
    /// Its own stream to one of the large model's width.
    pub post_projection: Linear,
    /// Chooses among groups of tokens.
    pub masked_embedding: Option<MaskedEmbedding>,
    #[module(skip)]
    config: Arc<DrafterConfig>,
}

/// What a drafter guesses.
#[derive(Clone, Debug)]
pub struct Guesses {
    /// `[count]`: tokens that may come one after the other.
    pub tokens: Tensor<1, Int>,
    /// Of each step, `[batch, hidden]`.
    streams: Vec<Columns>,
}

impl Guesses {
    /// The tokens on the host.
    ///
    /// # Errors
    /// [`Gemma4Error::Device`] where the device failed.
    pub fn tokens(&self) -> Result<Vec<u32>, Gemma4Error> {
        let tokens = self.tokens.clone().try_into_data().map_err(|error| {
            Gemma4Error::Device(format!("the drafter guessed nothing: {error}"))
        })?;
        Ok(tokens.iter::<i64>().map(|token| token as u32).collect())
    }

    /// `[count, hidden]` of the large model's width: the stream after each.
    pub fn hidden(&self) -> Tensor<2> {
        let streams = self.streams.iter().cloned().map(Columns::columns);
        Tensor::cat(streams.collect(), 0)
    }
}

impl Drafter {
    /// A drafter with random weights, drawn when they are first used, in the device's default dtype. Groups of tokens, if its head has
    /// them, are of tokens in their order.
    ///
    /// # Panics
    /// If the configuration is not [valid](DrafterConfig::validate).
    pub fn new(config: &DrafterConfig, device: &Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let tokens: Vec<i32> = (0..config.text.vocab_size as i32).collect();
        Self::of(config, &tokens, device)
    }

    /// [`new`](Self::new) of a valid configuration. `groups` are the tokens of each group, one group after the other.
    pub(crate) fn of(config: &DrafterConfig, groups: &[i32], device: &Device) -> Self {
        let text = &config.text;
        let linear = |input, output| Linear::new(input, output, text.initializer_range, device);
        let (hidden, backbone) = (text.hidden_size, config.backbone_hidden_size);
        Self {
            model: Gemma4Model::of(text, device),
            pre_projection: linear(2 * backbone, hidden),
            post_projection: linear(hidden, backbone),
            masked_embedding: config.ordered_embeddings.as_ref().map(|ordered| {
                let centroids = linear(hidden, ordered.num_centroids);
                MaskedEmbedding::new(ordered, groups, centroids, device)
            }),
            config: Arc::new(config.clone()),
        }
    }

    /// Its shape.
    pub fn config(&self) -> &DrafterConfig {
        &self.config
    }

    /// Guesses `count` tokens after `token`, which comes after what `cache` holds and has not been read. `hidden`, `[1, hidden]`, is what
    /// the logits that it was chosen by were made of: see [`Next::hidden`](crate::Next::hidden).
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where the drafter is not for `target`, where the cache is empty, padded or has several sequences, where the token is
    /// outside the vocabulary, and where `count` is 0.
    pub fn draft(
        &self,
        target: &Gemma4Model,
        cache: &Cache,
        token: u32,
        hidden: Tensor<2>,
        count: usize,
    ) -> Result<Guesses, Gemma4Error> {
        self.check(target)?;
        self.check_call(cache, token, hidden.dims(), count)?;
        Ok(self.guess(target, cache, &[token], hidden, count))
    }

    /// Refuses a model that it is not for, by what differs.
    pub(crate) fn check(&self, target: &Gemma4Model) -> Result<(), Gemma4Error> {
        self.config.check_target(target.config())?;
        self.check_numbers(target)
    }

    /// Refuses what cannot be guessed after.
    pub(crate) fn check_call(
        &self,
        cache: &Cache,
        token: u32,
        hidden: [usize; 2],
        count: usize,
    ) -> Result<(), Gemma4Error> {
        let refuse = |argument, reason: String| Err(Gemma4Error::Argument { argument, reason });
        self.config.text.check_tokens([i64::from(token)])?;
        if cache.is_empty() || cache.batch() != 1 {
            let reason = format!(
                "has {} columns of {} sequences; it should hold one sequence",
                cache.len(),
                cache.batch()
            );
            return refuse("cache", reason);
        }
        if cache.is_padded() {
            return refuse(
                "cache",
                "begins with padding, which a drafter would see".into(),
            );
        }
        let expected = [1, self.config.backbone_hidden_size];
        if hidden != expected {
            let reason = format!("has the shape {hidden:?}; it should be {expected:?}");
            return refuse("hidden", reason);
        }
        match count {
            0 => refuse("count", "is 0; it should be at least 1".into()),
            _ => Ok(()),
        }
    }

    /// Refuses another dtype or device than the large model's.
    fn check_numbers(&self, target: &Gemma4Model) -> Result<(), Gemma4Error> {
        let (found, expected) = (self.model.dtype(), target.dtype());
        match found == expected && self.model.device() == target.device() {
            true => Ok(()),
            false => Err(Gemma4Error::Argument {
                argument: "drafter",
                reason: format!(
                    "is in {} on {:?}; the model is in {} on {:?}",
                    found.name(),
                    self.model.device(),
                    expected.name(),
                    target.device()
                ),
            }),
        }
    }

    /// [`draft`](Self::draft) of what is known to fit, after a token of each sequence: `hidden` is `[batch, hidden]`, and there are `batch`
    /// guesses of each step, one step after the other. The cache's columns are aligned at their end.
    pub(crate) fn guess(
        &self,
        target: &Gemma4Model,
        cache: &Cache,
        tokens: &[u32],
        hidden: Tensor<2>,
        count: usize,
    ) -> Guesses {
        let (device, batch) = (target.device(), tokens.len());
        let dtype = hidden.dtype();
        let position = cache.positions(1);
        let mut shared = SharedKeyValues::default();
        for kind in [LayerType::Sliding, LayerType::Full] {
            if let Some(key_values) = cache.last_of(kind, &device) {
                shared.set(kind, key_values);
            }
        }
        let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
        let token = Tensor::<1, Int>::from_data(TensorData::new(tokens, [batch]), &device);
        #[cfg(feature = "cube")]
        if FewRows::serve(&self.model, batch) {
            let after = &mut |_| ();
            let mut operators = self
                .model
                .last_position(&position, batch, dtype, &device, after);
            return self.steps(target, token, hidden, &mut shared, &mut operators, count);
        }
        let mut operators = AnyRows {
            batch,
            rotations: Rotations::new(&self.model.rope, &position, dtype, &device),
            window: self.model.config().sliding_window,
            segments: None,
            cache: None,
            mlp_anew: false,
            observer: &mut (),
        };
        self.steps(target, token, hidden, &mut shared, &mut operators, count)
    }

    /// `count` steps one after the other, from a token of each sequence, `[batch]`, and the streams before them, `[batch, hidden]`.
    pub(crate) fn steps(
        &self,
        target: &Gemma4Model,
        mut token: Tensor<1, Int>,
        hidden: Tensor<2>,
        shared: &mut SharedKeyValues,
        operators: &mut impl Operators,
        count: usize,
    ) -> Guesses {
        #[cfg(feature = "cube")]
        if self.has_kernels(&hidden) {
            return self.steps_by_kernels(target, token, hidden, shared, operators, count);
        }
        let mut stream = Columns::all(hidden);
        let (mut tokens, mut streams) = (Vec::new(), Vec::new());
        for _ in 0..count {
            let embedded = flat_rows(target.embed_tokens.forward(token.unsqueeze::<2>()));
            let both = Tensor::cat(vec![embedded, stream.columns()], 1);
            let normed = self.layers(both, shared, operators);
            let scores;
            (stream, scores) = self.project(normed.clone(), operators);
            let table = self.model.head();
            token = match self.masked_embedding.as_ref().zip(scores) {
                Some((masked, scores)) => masked.token(normed, scores.columns(), &table),
                None => head::token(head::logits(normed, table)),
            };
            tokens.push(token.clone());
            streams.push(stream.clone());
        }
        Guesses {
            tokens: Tensor::cat(tokens, 0),
            streams,
        }
    }

    /// What the layers make of `[rows, 2 · hidden]`, embeddings beside streams: normalised.
    fn layers(
        &self,
        both: Tensor<2>,
        shared: &mut SharedKeyValues,
        operators: &mut impl Operators,
    ) -> Tensor<2> {
        let stream = Stream::new(operators.project(both, &self.pre_projection));
        let layers = 0..self.model.config().num_layers();
        let mut stream = self.model.layers(layers, stream, None, shared, operators);
        stream.norm(&self.model.norm)
    }

    /// The streams of the next step, and the scores of groups of tokens, if there are any.
    fn project(
        &self,
        normed: Tensor<2>,
        operators: &mut impl Operators,
    ) -> (Columns, Option<Columns>) {
        let centroids = self.masked_embedding.as_ref().map(|head| &head.centroids);
        let projections = std::iter::once(&self.post_projection).chain(centroids);
        let projections: Vec<&Linear> = projections.collect();
        let mut projected = operators.project_together(normed, &projections).into_iter();
        let stream = projected.next().expect("one for each projection");
        (stream, projected.next())
    }
}
