//! Multi-head attention with the parameters of `burn-nn` and the fused operator.

use super::input::{Masks, MhaInput};
use super::seed::next_seed;
use crate::call::compute_output;
use crate::options::AttentionOptions;
use burn::module::{Content, DisplaySettings, Module, ModuleDisplay};
use burn::nn::attention::{MhaOutput, MultiHeadAttentionConfig};
use burn::nn::{Dropout, Gelu, Linear};
use burn::tensor::activation::{quiet_softmax, softmax};
use burn::tensor::{Device, Tensor, assert_shape};

/// Multi-head attention with the fields and records of [`burn::nn::attention::MultiHeadAttention`]. Attention is computed by
/// [`fused_attention`](crate::fused_attention).
///
/// # Dropout
/// [`forward`](Self::forward) drops probabilities if the dropout is above 0, the tensors are on an autodiff device, and the
/// module is not frozen. Each call uses a new seed, see [`seed_dropout`](super::seed_dropout).
///
/// # Hidden keys
/// A hidden key has the probability 0 exactly. A query whose keys are all hidden has the attention output 0. `burn-nn`
/// instead replaces hidden scores by [`min_float`](Self::min_float), so the output of such a query is the mean of all rows
/// of V.
///
/// # Devices and dtypes
/// This module supports the devices, dtypes and head sizes of [`fused_attention`](crate::fused_attention).
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct MultiHeadAttention {
    /// The projection of the queries.
    pub query: Linear,
    /// The projection of the keys.
    pub key: Linear,
    /// The projection of the values.
    pub value: Linear,
    /// The projection of the output.
    pub output: Linear,
    /// The dropout of the probabilities.
    pub dropout: Dropout,
    /// An unused activation. The field exists because `burn-nn`'s module has it.
    pub activation: Gelu,
    /// The number of features of the inputs and the output.
    pub d_model: usize,
    /// The number of heads.
    pub n_heads: usize,
    /// The number of features of a head.
    pub d_k: usize,
    /// The score that [`forward_with_weights`](Self::forward_with_weights) gives to hidden keys. The fused operator
    /// ignores this field.
    pub min_float: f64,
    /// True if the softmax is the quiet softmax, `exp(x_i) / (1 + sum_j(exp(x_j)))`. The quiet softmax equals a softmax
    /// with a sink of 0 for each head.
    pub quiet_softmax: bool,
}

impl ModuleDisplay for MultiHeadAttention {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        content
            .add("d_model", &self.d_model)
            .add("n_heads", &self.n_heads)
            .add("d_k", &self.d_k)
            .add("dropout", &self.dropout.prob)
            .add("min_float", &self.min_float)
            .add("quiet_softmax", &self.quiet_softmax)
            .optional()
    }
}

impl From<burn::nn::attention::MultiHeadAttention> for MultiHeadAttention {
    fn from(module: burn::nn::attention::MultiHeadAttention) -> Self {
        Self {
            query: module.query,
            key: module.key,
            value: module.value,
            output: module.output,
            dropout: module.dropout,
            activation: module.activation,
            d_model: module.d_model,
            n_heads: module.n_heads,
            d_k: module.d_k,
            min_float: module.min_float,
            quiet_softmax: module.quiet_softmax,
        }
    }
}

impl From<MultiHeadAttention> for burn::nn::attention::MultiHeadAttention {
    fn from(module: MultiHeadAttention) -> Self {
        Self {
            query: module.query,
            key: module.key,
            value: module.value,
            output: module.output,
            dropout: module.dropout,
            activation: module.activation,
            d_model: module.d_model,
            n_heads: module.n_heads,
            d_k: module.d_k,
            min_float: module.min_float,
            quiet_softmax: module.quiet_softmax,
        }
    }
}

impl MultiHeadAttention {
    /// Creates the module that `config` describes, with new parameters on `device`.
    ///
    /// ```
    /// use attention_cube::nn::MultiHeadAttention;
    /// use burn::nn::attention::MultiHeadAttentionConfig;
    /// use burn::tensor::Device;
    ///
    /// # #[cfg(feature = "flex")] {
    /// let config = MultiHeadAttentionConfig::new(32, 4).with_dropout(0.0);
    /// let mha = MultiHeadAttention::new(&config, &Device::flex());
    /// assert_eq!(mha.d_k, 8);
    /// # }
    /// ```
    pub fn new(config: &MultiHeadAttentionConfig, device: &Device) -> Self {
        config.init(device).into()
    }

    /// Computes the context (the output of the module) but not the probabilities. The memory is linear in the sequence
    /// length.
    ///
    /// # Shapes
    /// `query [batch, q_len, d_model]`, `key` and `value` `[batch, kv_len, d_model]` → `[batch, q_len, d_model]`.
    ///
    /// # Panics
    /// Panics if an input or a mask has a wrong shape, or if an active dropout is above 0.99. Panics also if attention
    /// does not support the device or the head size.
    pub fn forward(&self, input: MhaInput) -> Tensor<3> {
        let ([query, key, value], masks) = self.project_input(input);
        self.compute_context(query, key, value, masks)
    }

    /// Computes the context and the probabilities, without the fused operator.
    ///
    /// # Shapes
    /// `query [batch, q_len, d_model]`, `key` and `value` `[batch, kv_len, d_model]` →
    /// `weights [batch, n_heads, q_len, kv_len]`, `context [batch, q_len, d_model]`. The weights are the probabilities
    /// after dropout.
    ///
    /// # Panics
    /// Panics if an input or a mask has a wrong shape.
    pub fn forward_with_weights(&self, input: MhaInput) -> MhaOutput {
        let ([query, key, value], masks) = self.project_input(input);
        let weights = self.compute_weights(query, key, masks);
        let context = self.project_output(weights.clone().matmul(value));
        MhaOutput { weights, context }
    }

    /// Checks the shapes of the input, and projects the input to heads of query, key and value, each
    /// `[batch, heads, length, d_k]`.
    fn project_input(&self, input: MhaInput) -> ([Tensor<4>; 3], Masks) {
        self.check_shapes(&input);
        let projected = [
            self.project_heads(input.query, &self.query),
            self.project_heads(input.key, &self.key),
            self.project_heads(input.value, &self.value),
        ];
        (projected, input.masks)
    }

    pub(super) fn check_shapes(&self, input: &MhaInput) {
        let [batch, _, _] = input.query.dims();
        let [_, kv_len, _] = input.key.dims();
        assert_shape!(input.query, [_, _, self.d_model]);
        assert_shape!(input.key, [batch, _, self.d_model]);
        assert_shape!(input.value, [batch, kv_len, self.d_model]);
    }

    /// Projects `[batch, length, d_model]` to heads `[batch, n_heads, length, d_k]`.
    pub(super) fn project_heads(&self, rows: Tensor<3>, projection: &Linear) -> Tensor<4> {
        let [batch, length, _] = rows.dims();
        projection
            .forward(rows)
            .reshape([batch, length, self.n_heads, self.d_k])
            .swap_dims(1, 2)
    }

    /// Projects heads `[batch, n_heads, length, d_k]` to the context `[batch, length, d_model]`.
    fn project_output(&self, heads: Tensor<4>) -> Tensor<3> {
        let [batch, n_heads, length, d_k] = heads.dims();
        let rows = heads
            .swap_dims(1, 2)
            .reshape([batch, length, n_heads * d_k]);
        self.output.forward(rows)
    }

    /// Computes the context of projected heads with the fused operator.
    ///
    /// # Shapes
    /// `query [batch, n_heads, q_len, d_k]`, `key` and `value` `[batch, n_heads, kv_len, d_k]` →
    /// `[batch, q_len, d_model]`.
    pub(super) fn compute_context(
        &self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        masks: Masks,
    ) -> Tensor<3> {
        let heads = self.compute_fused(query, key, value, masks);
        self.project_output(heads)
    }

    /// True if [`Dropout::forward`] would change the probabilities computed from `query` and `key`.
    fn has_active_dropout(&self, query: &Tensor<4>, key: &Tensor<4>) -> bool {
        let has_autodiff = query.device().is_autodiff() || key.device().is_autodiff();
        has_autodiff && self.dropout.training.is_enabled() && self.dropout.prob != 0.0
    }

    fn compute_fused(
        &self,
        query: Tensor<4>,
        key: Tensor<4>,
        value: Tensor<4>,
        masks: Masks,
    ) -> Tensor<4> {
        let mut options = AttentionOptions::new();
        if masks.causal {
            options = options.causal();
        }
        if let Some(hidden) = masks.hidden() {
            options = options.hidden(hidden);
        }
        if self.quiet_softmax {
            let sinks = Tensor::<1>::zeros([self.n_heads], (&query.device(), query.dtype()));
            options = options.sinks(sinks);
        }
        if self.has_active_dropout(&query, &key) {
            options = options.dropout(self.dropout.prob, next_seed());
        }
        match compute_output(query, key, value, options) {
            Ok(heads) => heads,
            Err(error) => panic!("MultiHeadAttention: {error}"),
        }
    }

    /// Computes the probabilities, `[batch, n_heads, q_len, kv_len]`. If dropout is active, the function also drops
    /// probabilities.
    fn compute_weights(&self, query: Tensor<4>, key: Tensor<4>, masks: Masks) -> Tensor<4> {
        let lengths = [query.dims()[2], key.dims()[2]];
        let hidden = masks.hidden_with_causal(lengths, &query.device());
        let mut scores = query
            .matmul(key.transpose())
            .div_scalar((self.d_k as f32).sqrt());
        if let Some(hidden) = &hidden {
            scores = scores.mask_fill(hidden.clone(), self.min_float);
        }
        let mut weights = match self.quiet_softmax {
            true => quiet_softmax(scores, 3),
            false => softmax(scores, 3),
        };
        // If all keys of a query are hidden, all their scores equal `min_float`, and the softmax gives them weights
        // above 0. Set the weights of hidden keys to 0.
        if let Some(hidden) = hidden {
            weights = weights.mask_fill(hidden, 0.0);
        }
        self.dropout.forward(weights)
    }
}
