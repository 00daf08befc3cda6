//! Attention of one layer, through `fused_attention`, or `quantized_attention` where keys and values are quantized.

use super::{Linear, RmsNorm};
#[cfg(feature = "cube")]
use crate::op::{self, linear::few_rows::MOST_ROWS, rows_of_heads::rows_of_heads};
use crate::{
    Gemma4Config, LayerType,
    model::cache::{
        key_values::KeyValues,
        slots::{Slots, rows},
    },
};
use attention_cube::{fused_attention, quantized::quantized_attention};
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// Queries, keys and values of one layer and what becomes of them. Layers that read an earlier layer's keys
/// and values have only queries.
#[derive(Module, Debug)]
pub struct Attention {
    /// `[q_heads · head_dim, hidden]`.
    pub q_proj: Linear,
    /// Of each query head.
    pub q_norm: RmsNorm,
    /// `[kv_heads · head_dim, hidden]`.
    pub k_proj: Option<Linear>,
    /// Of each key head.
    pub k_norm: Option<RmsNorm>,
    /// `[kv_heads · head_dim, hidden]`; absent where values are made of what keys are made of.
    pub v_proj: Option<Linear>,
    /// `[hidden, q_heads · head_dim]`.
    pub o_proj: Linear,
    #[module(skip)]
    pub(crate) head_dim: usize,
    /// Of the model.
    #[module(skip)]
    pub(crate) layer: usize,
    #[module(skip)]
    pub(crate) kind: LayerType,
}

impl Attention {
    pub(crate) fn new(config: &Gemma4Config, layer: usize, device: &Device) -> Self {
        let head_dim = config.head_dim(layer);
        let hidden = config.hidden_size;
        let linear = |input, output| Linear::new(input, output, config.initializer_range, device);
        // The scale is 1, so that norms of 1 would give scores of a deviation of √head_dim, which no softmax learns from.
        let weight = (head_dim as f64).powf(-0.25);
        let norm = || RmsNorm::of(weight, head_dim, config.rms_norm_eps, device);
        let own = !config.is_shared(layer);
        let queries = config.num_attention_heads * head_dim;
        let keys = config.key_value_heads(layer) * head_dim;
        Self {
            q_proj: linear(hidden, queries),
            q_norm: norm(),
            k_proj: own.then(|| linear(hidden, keys)),
            k_norm: own.then(norm),
            v_proj: (own && !config.values_are_keys(layer)).then(|| linear(hidden, keys)),
            o_proj: linear(queries, hidden),
            head_dim,
            layer,
            kind: config.layer_types[layer],
        }
    }

    /// The norm of keys.
    ///
    /// # Panics
    /// For a layer that reads an earlier layer's keys.
    pub(crate) fn key_norm(&self) -> &RmsNorm {
        self.k_norm.as_ref().expect("the layer makes keys")
    }

    /// The weight of the norm of queries for `key_values`.
    pub(crate) fn query_weight(&self, key_values: &KeyValues) -> Tensor<1> {
        let weight = self.q_norm.weight.val();
        match &key_values.compact {
            Some(compact) => weight * compact.query_factor.clone(),
            None => weight,
        }
    }

    /// What queries `[batch, q_heads, positions, head_dim]` read: `[batch · positions, q_heads · head_dim]`, before the
    /// projection back.
    pub(crate) fn attend(&self, query: Tensor<4>, key_values: &KeyValues) -> Tensor<2> {
        let [batch, heads, positions, head_dim] = query.dims();
        let options = key_values.visible.options();
        let read = match (key_values.key.clone(), key_values.value.clone()) {
            (
                Slots::Q8 { words, scales },
                Slots::Q8 {
                    words: values,
                    scales: value_scales,
                },
            ) => quantized_attention(
                query,
                rows(words, scales),
                rows(values, value_scales),
                options,
            ),
            (key, value) => fused_attention(query, key.numbers(), value.numbers(), options),
        };
        let read = match &key_values.compact {
            Some(compact) => compact.channels(read),
            None => read,
        };
        #[cfg(feature = "cube")]
        if positions > 1 && batch * positions <= MOST_ROWS && op::serve(&read) {
            return rows_of_heads(read);
        }
        read.swap_dims(1, 2)
            .reshape([batch * positions, heads * head_dim])
    }
}
