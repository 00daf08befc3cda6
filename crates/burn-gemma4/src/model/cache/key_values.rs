//! The keys and values that a layer's queries attend to, and the rules that decide which keys a query sees.

use super::{compact::CompactKeys, slots::Slots};
use crate::config::LayerType;
use attention_cube::AttentionOptions;
use burn::tensor::{Bool, Int, Tensor};

/// The keys and values that a layer's queries attend to, and which of the keys each query sees.
#[derive(Clone, Debug)]
pub(crate) struct KeyValues {
    /// The normalized and rotated keys, `[batch, kv_heads, kv_len, head_dim]`.
    pub key: Slots,
    /// The normalized values, `[batch, kv_heads, kv_len, head_dim]`.
    pub value: Slots,
    /// The rules that decide which keys a query sees.
    pub visible: Visible,
    /// The layout of compact keys, or `None` if keys and values have separate buffers.
    pub compact: Option<CompactKeys>,
}

impl KeyValues {
    /// Creates a view of keys and values in separate buffers.
    pub fn new(key: Slots, value: Slots, visible: Visible) -> Self {
        Self {
            key,
            value,
            visible,
            compact: None,
        }
    }

    /// Creates views of the keys and the values in compact slots, without a copy.
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

/// The rules that decide which keys a query sees. The last query is at the position of the last key.
#[derive(Clone, Debug, Default)]
pub(crate) struct Visible {
    /// True if a query sees no key at a later position than its own.
    pub causal: bool,
    /// The largest number of keys that a query sees, including the key at its own position. `None` means no window.
    pub window: Option<usize>,
    /// The largest distance of a key before or after the query that a query sees, as in an encoder. `None` means no
    /// such window.
    pub radius: Option<usize>,
    /// The number of valid keys in each sequence, `[batch]`, or `None` if all keys are valid.
    pub lengths: Option<Tensor<1, Int>>,
    /// True if no launch of a captured graph writes `lengths`. A kernel may then read `lengths` before the previous launch
    /// has ended (PDL).
    pub lengths_ahead: bool,
    /// The padding mask, `[batch, 1, 1, kv_len]`: `false` if a key is padding. `None` means that no key is padding.
    pub mask: Option<Tensor<4, Bool>>,
    /// The index of the packed document of each position, `[batch, kv_len]`, or `None` if the sequences are not packed. A
    /// query sees only keys of its own document.
    pub segments: Option<Tensor<2, Int>>,
    /// Up to two intervals of keys that each query sees: the first key, and the first key after the interval, each
    /// `[batch, queries]`. A query sees the keys of both. The intervals replace the causal mask and the window in calls
    /// with image blocks, and over packed prompts.
    pub intervals: Vec<[Tensor<2, Int>; 2]>,
}

impl Visible {
    /// Returns the rules that decide which keys a query sees in a layer of type `kind`. The keys are in text order.
    pub fn in_order(kind: LayerType, window: usize) -> Self {
        Self {
            causal: true,
            window: (kind == LayerType::Sliding).then_some(window),
            ..Self::default()
        }
    }

    /// Returns the options of an attention call. The call's queries are the last `queries` queries to which the rules apply.
    pub fn options(&self, queries: usize) -> AttentionOptions {
        // The scale is 1, because the learned norm weights of queries and keys contain the attention scale.
        let mut options = AttentionOptions::new().scale(1.0);
        if self.causal {
            options = options.causal();
        }
        if let Some(window) = self.window {
            options = options.window(Some(window - 1), Some(0));
        }
        if let Some(radius) = self.radius {
            options = options.window(Some(radius), Some(radius));
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
        for interval in &self.intervals {
            let [start, end] = interval.clone().map(|bound| {
                let [_, all] = bound.dims();
                bound.narrow(1, all - queries, queries)
            });
            options = options.visible_between(start, end);
        }
        options
    }
}

/// The keys and values that shared KV layers read from earlier layers, because shared KV layers compute none of their
/// own. Each field belongs to one layer type. The field holds the keys and values of the last layer of this type that
/// is not a shared KV layer.
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

    /// Replaces the rules that decide which keys the next queries see. `visible` returns the rules of layers of a type.
    pub fn see(&mut self, visible: impl Fn(LayerType) -> Visible) {
        for (key_values, kind) in [
            (&mut self.sliding, LayerType::Sliding),
            (&mut self.full, LayerType::Full),
        ] {
            if let Some(key_values) = key_values {
                key_values.visible = visible(kind);
            }
        }
    }

    /// Lets the queries of each sequence see only the sequence's first keys. `sliding` and `full`, each `[batch]`, are
    /// the numbers of these keys in layers of the two types. The queries of a sequence must be at the position of the
    /// last of these keys. No launch of a captured graph may write the numbers.
    #[cfg(feature = "cube")]
    pub fn limit(&mut self, sliding: &Tensor<1, Int>, full: &Tensor<1, Int>) {
        for (key_values, lengths) in [(&mut self.sliding, sliding), (&mut self.full, full)] {
            if let Some(key_values) = key_values {
                key_values.visible.lengths = Some(lengths.clone());
                key_values.visible.lengths_ahead = true;
            }
        }
    }

    pub fn get(&self, kind: LayerType) -> Option<&KeyValues> {
        match kind {
            LayerType::Sliding => self.sliding.as_ref(),
            LayerType::Full => self.full.as_ref(),
        }
    }
}
