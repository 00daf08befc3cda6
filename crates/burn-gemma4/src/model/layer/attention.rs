//! The attention of one layer, which calls `fused_attention`, or `quantized_attention` if the KV cache is int8.

use super::{Linear, RmsNorm};
use crate::config::{Gemma4Config, LayerType};
use crate::model::cache::key_values::KeyValues;
use crate::model::cache::slots::{Slots, rows};
#[cfg(feature = "cube")]
use crate::op;
#[cfg(feature = "cube")]
use crate::op::gemv::BATCH_MAX_ROWS;
#[cfg(feature = "cube")]
use crate::op::merge_heads::rows_of_heads;
use attention_cube::{fused_attention, quantized::quantized_attention};
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// The projections and norms of one layer's attention. A shared KV layer has only the query and output projections.
#[derive(Module, Debug)]
pub struct Attention {
    /// The query projection, `[q_heads · head_dim, hidden]`.
    pub q_proj: Linear,
    /// The norm of each query head.
    pub q_norm: RmsNorm,
    /// The key projection, `[kv_heads · head_dim, hidden]`. It is `None` in a shared KV layer.
    pub k_proj: Option<Linear>,
    /// The norm of each key head. It is `None` in a shared KV layer.
    pub k_norm: Option<RmsNorm>,
    /// The value projection, `[kv_heads · head_dim, hidden]`. `None` in a shared KV layer, or if the values come from the
    /// key projection.
    pub v_proj: Option<Linear>,
    /// The output projection, `[hidden, q_heads · head_dim]`.
    pub o_proj: Linear,
    #[module(skip)]
    pub(crate) head_dim: usize,
    /// The index of the layer in the model.
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
        // Initialize the norm weights of queries and keys below 1, because the attention scale is 1. With weights of 1
        // the softmax would saturate: the scores would have a standard deviation of √head_dim.
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

    /// Returns the norm of the keys.
    ///
    /// # Panics
    /// Panics if the layer is a shared KV layer.
    pub(crate) fn key_norm(&self) -> &RmsNorm {
        self.k_norm
            .as_ref()
            .expect("a layer with its own keys and values has a key norm")
    }

    /// Returns the weight of the query norm. With compact keys, this weight is multiplied by the key norm's weight in
    /// the channels without rotation.
    pub(crate) fn query_weight(&self, key_values: &KeyValues) -> Tensor<1> {
        let weight = self.q_norm.weight.val();
        match &key_values.compact {
            Some(compact) => weight * compact.query_factor.clone(),
            None => weight,
        }
    }

    /// Computes attention for queries `[batch, q_heads, positions, head_dim]`. Returns
    /// `[batch · positions, q_heads · head_dim]`.
    pub(crate) fn attend(&self, query: Tensor<4>, key_values: &KeyValues) -> Tensor<2> {
        let [batch, heads, positions, head_dim] = query.dims();
        let options = key_values.visible.options(positions);
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
        if positions > 1 && batch * positions <= BATCH_MAX_ROWS && op::serve(&read) {
            return rows_of_heads(read);
        }
        read.swap_dims(1, 2)
            .reshape([batch * positions, heads * head_dim])
    }
}
