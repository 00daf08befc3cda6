//! The drafter (multi-token prediction, MTP) of a Gemma 4 model. A few layers propose draft tokens from the target
//! model's hidden state, keys and values. The drafter computes no keys or values of its own.
//!
//! A run of the drafter consists of several drafting steps, and each step proposes one draft token. All steps use the
//! same position, which is the position of the text's last token.
//!
//! The inputs of a step are the previous token and a hidden state. This hidden state comes from the target model in the
//! first step, and from the previous step afterwards.

mod head;
#[cfg(feature = "cube")]
mod kernels;

pub use head::MaskedEmbedding;

use crate::config::LayerType;
use crate::config::drafter::DrafterConfig;
use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::cache::Cache;
use crate::model::cache::key_values::SharedKeyValues;
#[cfg(feature = "cube")]
use crate::model::decode_ops::DecodeOps;
use crate::model::layer::Linear;
use crate::model::layer::ops::{LayerOps, ResidualStream};
use crate::model::prefill_ops::{KvDestination, PrefillOps, Rotations};
use crate::model::row_rules::RowRules;
use crate::op::column_slice::ColumnSlice;
use crate::op::flat_rows;
use burn::{
    module::Module,
    tensor::{Device, Int, Tensor, TensorData},
};
use std::sync::Arc;

/// A small model that proposes draft tokens for a large target model. The field names equal the names of the tensors in
/// a checkpoint.
#[derive(Module, Debug)]
pub struct Drafter {
    /// The drafter's layers and its embedding table, which is also the weight matrix of the head. The layers have no
    /// key and value projections.
    pub(crate) model: Gemma4Model,
    /// The projection to the drafter's width. The input of the projection concatenates a token's embedding and the
    /// previous hidden state. Both have the target model's width.
    pub pre_projection: Linear,
    /// The projection of the drafter's hidden state to the target model's width.
    pub post_projection: Linear,
    /// The head that first scores groups of tokens, or `None` if the head scores the whole vocabulary.
    pub masked_embedding: Option<MaskedEmbedding>,
    #[module(skip)]
    config: Arc<DrafterConfig>,
}

/// The draft tokens of one run of the drafter.
#[derive(Clone, Debug)]
pub struct Draft {
    /// The draft tokens, `[count · batch]`, ordered by drafting step. For a single sequence this is the order of the
    /// text.
    pub tokens: Tensor<1, Int>,
    /// The hidden state after each drafting step, `[batch, hidden]`.
    streams: Vec<ColumnSlice>,
}

impl Draft {
    /// Copies the draft tokens to the host.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Device`] if the device failed.
    pub fn tokens(&self) -> Result<Vec<u32>, Gemma4Error> {
        let tokens = self.tokens.clone().try_into_data().map_err(|error| {
            Gemma4Error::Device(format!("cannot read the drafter's tokens: {error}"))
        })?;
        Ok(tokens.iter::<i64>().map(|token| token as u32).collect())
    }

    /// Returns the hidden state after each draft token, `[count · batch, hidden]`, in the order of `tokens`. The hidden
    /// states have the target model's width.
    pub fn hidden(&self) -> Tensor<2> {
        let streams = self.streams.iter().cloned().map(ColumnSlice::columns);
        Tensor::cat(streams.collect(), 0)
    }
}

impl Drafter {
    /// Creates a drafter with random weights in the device's default dtype. Each weight is drawn when it is first used.
    /// Each group of the head has consecutive token ids.
    ///
    /// # Panics
    /// Panics if the configuration is not [valid](DrafterConfig::validate).
    pub fn new(config: &DrafterConfig, device: &Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let tokens: Vec<i32> = (0..config.text.vocab_size as i32).collect();
        Self::of(config, &tokens, device)
    }

    /// Creates a drafter from a valid configuration, as [`new`](Self::new) does. `groups` lists the token ids of the
    /// first group, then those of the second group, and so on.
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

    /// Returns the drafter's configuration.
    pub fn config(&self) -> &DrafterConfig {
        &self.config
    }

    /// Proposes `count` draft tokens after `token`, the last token of the text. `cache` does not hold `token` yet.
    ///
    /// # Shapes
    /// `hidden`: `[1, hidden]`, the hidden state from which `token` was chosen: see
    /// [`Next::hidden`](crate::generate::decode::Next::hidden).
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] in these cases:
    ///
    /// - The drafter does not fit `target`.
    /// - The cache is empty, is padded or holds several sequences.
    /// - The token is outside the vocabulary, or `count` is 0.
    pub fn draft(
        &self,
        target: &Gemma4Model,
        cache: &Cache,
        token: u32,
        hidden: Tensor<2>,
        count: usize,
    ) -> Result<Draft, Gemma4Error> {
        self.check(target)?;
        self.check_call(cache, token, hidden.dims(), count)?;
        Ok(self.guess(target, cache, &[token], hidden, count))
    }

    /// Checks that the drafter fits the target model. The error says how they differ.
    pub(crate) fn check(&self, target: &Gemma4Model) -> Result<(), Gemma4Error> {
        self.config.check_target(target.config())?;
        self.check_numbers(target)
    }

    /// Checks the arguments of [`draft`](Self::draft).
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

    /// Checks that the drafter and the target model have the same dtype and device.
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

    /// Runs [`draft`](Self::draft) for one token per sequence, without checks. `hidden` is `[batch, hidden]`. The
    /// result holds `batch` tokens of the first drafting step, then those of the second, and so on. In the cache, the
    /// last tokens of all sequences must have the same index.
    pub(crate) fn guess(
        &self,
        target: &Gemma4Model,
        cache: &Cache,
        tokens: &[u32],
        hidden: Tensor<2>,
        count: usize,
    ) -> Draft {
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
        if DecodeOps::serve(&self.model, batch) {
            let after = &mut |_| ();
            let mut operators = self
                .model
                .last_position(&position, batch, dtype, &device, after);
            return self.steps(target, token, hidden, &mut shared, &mut operators, count);
        }
        let mut operators = PrefillOps {
            batch,
            rotations: Rotations::new(&self.model.rope, &position, dtype, &device),
            window: self.model.config().sliding_window,
            rules: RowRules::default(),
            destination: KvDestination::Dropped,
            adapters: None,
            mlp_recompute: false,
            observer: &mut (),
        };
        self.steps(target, token, hidden, &mut shared, &mut operators, count)
    }

    /// Runs `count` drafting steps from one token per sequence, `[batch]`. `hidden`, `[batch, hidden]`, are the hidden
    /// states from which the tokens were chosen.
    pub(crate) fn steps(
        &self,
        target: &Gemma4Model,
        mut token: Tensor<1, Int>,
        hidden: Tensor<2>,
        shared: &mut SharedKeyValues,
        operators: &mut impl LayerOps,
        count: usize,
    ) -> Draft {
        #[cfg(feature = "cube")]
        if self.has_kernels(&hidden) {
            return self.steps_by_kernels(target, token, hidden, shared, operators, count);
        }
        let mut stream = ColumnSlice::all(hidden);
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
        Draft {
            tokens: Tensor::cat(tokens, 0),
            streams,
        }
    }

    /// Runs the drafter's layers. `both`, `[rows, 2 · hidden]`, concatenates embeddings and hidden states. Returns the
    /// hidden states after the final norm.
    fn layers(
        &self,
        both: Tensor<2>,
        shared: &mut SharedKeyValues,
        operators: &mut impl LayerOps,
    ) -> Tensor<2> {
        let stream = ResidualStream::new(operators.project(both, &self.pre_projection));
        let layers = 0..self.model.config().num_layers();
        let mut stream = self.model.layers(layers, stream, None, shared, operators);
        stream.norm(&self.model.norm)
    }

    /// Projects normalized hidden states to the hidden states for the next step. Also computes the groups' scores, if
    /// the head has groups.
    fn project(
        &self,
        normed: Tensor<2>,
        operators: &mut impl LayerOps,
    ) -> (ColumnSlice, Option<ColumnSlice>) {
        let centroids = self.masked_embedding.as_ref().map(|head| &head.centroids);
        let projections = std::iter::once(&self.post_projection).chain(centroids);
        let projections: Vec<&Linear> = projections.collect();
        let mut projected = operators.project_together(normed, &projections).into_iter();
        let stream = projected
            .next()
            .expect("project_together gives one output per projection");
        (stream, projected.next())
    }
}
