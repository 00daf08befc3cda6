//! Attention of one layer, through `fused_attention`.

use super::{Linear, RmsNorm};
use crate::{
    Gemma4Config, LayerType,
    model::cache::CompactKeys,
    op::{
        norm::normalize,
        rope::{Rotation, split_heads},
    },
};
use attention_cube::{AttentionOptions, fused_attention};
use burn::{
    module::Module,
    tensor::{Bool, Device, Int, Tensor},
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
    head_dim: usize,
    #[module(skip)]
    epsilon: f64,
}

/// Keys and values that a layer attends to, and what its queries see of them.
#[derive(Clone, Debug)]
pub struct KeyValues {
    /// `[batch, kv_heads, kv_len, head_dim]`, normalised and rotated.
    pub key: Tensor<4>,
    /// `[batch, kv_heads, kv_len, head_dim]`, normalised.
    pub value: Tensor<4>,
    /// What the queries see.
    pub visible: Visible,
    /// Where keys and values share columns, how: the key's norm is then the query's in part.
    pub(crate) compact: Option<CompactKeys>,
}

impl KeyValues {
    /// Keys and values with columns of their own.
    pub(crate) fn new(key: Tensor<4>, value: Tensor<4>, visible: Visible) -> Self {
        Self {
            key,
            value,
            visible,
            compact: None,
        }
    }
}

/// What queries see of keys. The last query is at the last key.
#[derive(Clone, Debug, Default)]
pub struct Visible {
    /// No query sees a later key.
    pub causal: bool,
    /// A query sees this many keys, its own included.
    pub window: Option<usize>,
    /// `[batch]`: how many of the keys exist.
    pub lengths: Option<Tensor<1, Int>>,
    /// `[batch, 1, 1, kv_len]`: `false` where a key is padding.
    pub mask: Option<Tensor<4, Bool>>,
    /// `[batch, kv_len]`: the document that each key, and the query at the same place, belongs to. Only those of one
    /// document see each other.
    pub segments: Option<Tensor<2, Int>>,
}

impl Visible {
    /// What a query of a layer of `kind` sees where the keys are all positions so far, in their order.
    pub fn in_order(kind: LayerType, window: usize) -> Self {
        Self {
            causal: true,
            window: (kind == LayerType::Sliding).then_some(window),
            ..Self::default()
        }
    }

    fn options(&self) -> AttentionOptions {
        // The norms of queries and keys have learned the scale.
        let mut options = AttentionOptions::new().scale(1.0);
        if self.causal {
            options = options.causal();
        }
        if let Some(window) = self.window {
            options = options.window(Some(window - 1), Some(0));
        }
        if let Some(lengths) = &self.lengths {
            options = options.kv_lengths(lengths.clone());
        }
        if let Some(mask) = &self.mask {
            options = options.mask(mask.clone());
        }
        if let Some(segments) = &self.segments {
            options = options.segments(segments.clone(), segments.clone());
        }
        options
    }
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
            epsilon: config.rms_norm_eps,
        }
    }

    /// The layer's own keys and values of `[batch, positions, hidden]`, each
    /// `[batch, kv_heads, positions, head_dim]`; `None` if it reads an earlier layer's.
    pub fn key_value(
        &self,
        input: &Tensor<3>,
        rotation: &Rotation,
    ) -> Option<(Tensor<4>, Tensor<4>)> {
        let (k_proj, k_norm) = (self.k_proj.as_ref()?, self.k_norm.as_ref()?);
        let key = k_proj.forward(input.clone());
        let value = match &self.v_proj {
            Some(v_proj) => v_proj.forward(input.clone()),
            None => key.clone(),
        };
        let key = rotation.heads(key, k_norm);
        let value = split_heads(value, self.head_dim);
        let value = normalize(value, self.epsilon).swap_dims(1, 2);
        Some((key, value))
    }

    /// The weight of the norm of keys.
    ///
    /// # Panics
    /// For a layer that reads an earlier layer's keys.
    pub(crate) fn key_weight(&self) -> Tensor<1> {
        let norm = self.k_norm.as_ref().expect("the layer makes keys");
        norm.weight.val()
    }

    /// The weight of the norm of queries for `key_values`.
    pub(crate) fn query_weight(&self, key_values: &KeyValues) -> Tensor<1> {
        let weight = self.q_norm.weight.val();
        match &key_values.compact {
            Some(compact) => weight * compact.query_factor.clone(),
            None => weight,
        }
    }

    /// The queries of `[batch, positions, hidden]` for `key_values`: `[batch, q_heads, positions, head_dim]`.
    pub fn query(
        &self,
        input: Tensor<3>,
        rotation: &Rotation,
        key_values: &KeyValues,
    ) -> Tensor<4> {
        let projected = self.q_proj.forward(input);
        match &key_values.compact {
            Some(compact) => {
                let norm = self.q_norm.with_weight(self.query_weight(key_values));
                compact.queries(rotation.heads(projected, &norm))
            }
            None => rotation.heads(projected, &self.q_norm),
        }
    }

    /// What the queries read: `[batch, positions, q_heads · head_dim]`, before the projection back.
    pub fn attend(&self, query: Tensor<4>, key_values: &KeyValues) -> Tensor<3> {
        let [batch, heads, positions, head_dim] = query.dims();
        let read = fused_attention(
            query,
            key_values.key.clone(),
            key_values.value.clone(),
            key_values.visible.options(),
        );
        let read = match &key_values.compact {
            Some(compact) => compact.channels(read),
            None => read,
        };
        read.swap_dims(1, 2)
            .reshape([batch, positions, heads * head_dim])
    }
}
