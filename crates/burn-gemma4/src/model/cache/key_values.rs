//! What queries read: keys and values, and what is visible of them.

use super::{compact::CompactKeys, slots::Slots};
use crate::LayerType;
use attention_cube::AttentionOptions;
use burn::tensor::{Bool, Int, Tensor};

/// Keys and values that a layer attends to, and what its queries see of them.
#[derive(Clone, Debug)]
pub(crate) struct KeyValues {
    /// `[batch, kv_heads, kv_len, head_dim]`, normalised and rotated.
    pub key: Slots,
    /// `[batch, kv_heads, kv_len, head_dim]`, normalised.
    pub value: Slots,
    /// What the queries see.
    pub visible: Visible,
    /// Where keys and values share columns, how: the key's norm is then the query's in part.
    pub compact: Option<CompactKeys>,
}

impl KeyValues {
    /// Keys and values with columns of their own.
    pub fn new(key: Slots, value: Slots, visible: Visible) -> Self {
        Self {
            key,
            value,
            visible,
            compact: None,
        }
    }

    /// Keys and values that share slots, `[batch, kv_heads, slots, width]`, read where they lie.
    pub fn of_slots(slots: &Slots, keys: &CompactKeys, visible: Visible) -> Self {
        let (rotated, head_dim) = (keys.layout.rotated(), keys.layout.head_dim);
        Self {
            key: slots.columns(rotated, head_dim),
            value: slots.columns(0, head_dim),
            visible,
            compact: Some(keys.clone()),
        }
    }
}

/// What queries see of keys. The last query is at the last key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Visible {
    /// No query sees a later key.
    pub causal: bool,
    /// A query sees this many keys, its own included.
    pub window: Option<usize>,
    /// `[batch]`: how many of the keys exist.
    pub lengths: Option<Tensor<1, Int>>,
    /// Whether no launch of a graph writes them.
    pub lengths_ahead: bool,
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

    pub fn options(&self) -> AttentionOptions {
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
            options = options.kv_lengths_ahead(self.lengths_ahead);
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

/// The keys and values that layers without their own read: of each type those of the last layer that made its own.
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

    pub fn get(&self, kind: LayerType) -> Option<&KeyValues> {
        match kind {
            LayerType::Sliding => self.sliding.as_ref(),
            LayerType::Full => self.full.as_ref(),
        }
    }
}
