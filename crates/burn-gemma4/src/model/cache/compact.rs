//! Compact keys: keys and values in one buffer, for layers that compute both from the same projection.
//!
//! In these layers the key is the value times the weight `w` of the key norm, and RoPE then rotates some channels of the key.
//! In a channel without rotation, attention multiplies the query by `w` and reads the value instead of the key. The buffer
//! stores the whole value and only the rotated channels of the key:
//!
//! ```text
//! slot     value's rotated   | value's others    | key's rotated
//! values   '-------------------------------------'
//! keys                         '-----------------------------------'
//! ```
//!
//! A Gemma 4 head has 512 channels, and RoPE rotates 128 of them. A slot therefore has 640 elements instead of 1024. In
//! half precision the attention output differs by rounding from the output with separate keys.

use super::precision::CODES;
use super::slots::Slots;
use crate::config::Gemma4Config;
#[cfg(feature = "cube")]
use crate::op::stream::StreamCheck;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

/// The layout of the channels in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompactLayout {
    pub head_dim: usize,
    /// The number of rotated channel pairs. Pair `p` consists of the channels `p` and `p + head_dim / 2`.
    pub rotated_pairs: usize,
}

impl CompactLayout {
    /// Returns the layout of a layer's slots, or `None` if the layer does not support compact keys or would not save
    /// memory.
    pub fn of(config: &Gemma4Config, layer: usize) -> Option<Self> {
        let head_dim = config.head_dim(layer);
        let layout = Self {
            head_dim,
            rotated_pairs: config.global_rope.rotated_pairs(head_dim),
        };
        (config.values_are_keys(layer) && layout.width() < 2 * head_dim).then_some(layout)
    }

    /// True if the key range and the value range of a slot begin and end at multiples of four elements. In int8, four
    /// elements fill a 32-bit word.
    pub fn has_words(&self) -> bool {
        self.head_dim.is_multiple_of(CODES) && self.rotated().is_multiple_of(CODES)
    }

    /// Returns the number of elements in a slot.
    pub fn width(&self) -> usize {
        self.head_dim + self.rotated()
    }

    /// Returns the number of rotated channels.
    pub fn rotated(&self) -> usize {
        2 * self.rotated_pairs
    }

    /// Returns the order in which a slot stores the value's channels. The value's rotated channels come first, and its
    /// other channels lie next to the key's rotated channels. The key consists of these other channels and of its own
    /// rotated channels, so it forms one contiguous range.
    fn value_order(&self) -> Vec<usize> {
        let (pairs, rotated) = (self.head_dim / 2, self.rotated_pairs);
        [
            0..rotated,
            pairs..pairs + rotated,
            rotated..pairs,
            pairs + rotated..self.head_dim,
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Returns the order in which a slot stores the key's channels. The list holds, for each stored element, the index
    /// of the element's channel.
    fn key_order(&self) -> Vec<usize> {
        let mut order = self.value_order();
        order.rotate_left(self.rotated());
        order
    }

    /// Returns, for each element of a slot, its index in the concatenation of the value's channels and the key's channels.
    fn slot_order(&self) -> Vec<usize> {
        let mut order = self.value_order();
        order.extend_from_within(..self.rotated());
        for channel in &mut order[self.head_dim..] {
            *channel += self.head_dim;
        }
        order
    }

    /// Returns, for each channel, its index in a slot: the inverse of [`value_order`](Self::value_order).
    fn value_columns(&self) -> Vec<usize> {
        let mut columns = vec![0; self.head_dim];
        for (column, channel) in self.value_order().into_iter().enumerate() {
            columns[channel] = column;
        }
        columns
    }
}

/// Tensors that adapt keys, values and queries to compact slots. The index tensors reorder channels to the layout of a
/// slot and back. The query factor multiplies each channel of a query before the query attends to the slots.
#[derive(Clone, Debug)]
pub(crate) struct CompactKeys {
    pub layout: CompactLayout,
    /// The factor of each channel of a query, `[head_dim]`: the key norm's weight in channels without rotation, and 1 in
    /// rotated channels.
    pub query_factor: Tensor<1>,
    slot_order: Tensor<1, Int>,
    key_order: Tensor<1, Int>,
    value_columns: Tensor<1, Int>,
}

impl CompactKeys {
    /// Reports to `check` whether the tensors were allocated on the current stream.
    #[cfg(feature = "cube")]
    pub fn check_streams(&self, check: &mut StreamCheck) {
        check.floats(self.query_factor.clone());
        for order in [&self.slot_order, &self.key_order, &self.value_columns] {
            check.integers(order.clone());
        }
    }

    /// Builds the index tensors and the query factor. `key_weight`, `[head_dim]`, is the key norm's weight. In channels
    /// without rotation the stored keys lack this weight, so the query factor contains the weight.
    pub fn new(layout: CompactLayout, key_weight: &Tensor<1>) -> Self {
        let device = key_weight.device();
        let pairs = layout.head_dim / 2;
        let is_rotated: Vec<bool> = (0..layout.head_dim)
            .map(|channel| channel % pairs < layout.rotated_pairs)
            .collect();
        let is_rotated = TensorData::new(is_rotated, [layout.head_dim]);
        let is_rotated = Tensor::<1, Bool>::from_data(is_rotated, &device);
        Self {
            layout,
            query_factor: key_weight.clone().mask_fill(is_rotated, 1.0),
            slot_order: indices(layout.slot_order(), &device),
            key_order: indices(layout.key_order(), &device),
            value_columns: indices(layout.value_columns(), &device),
        }
    }

    /// Builds slots, `[batch, kv_heads, positions, width]`, from keys and values, each
    /// `[batch, kv_heads, positions, head_dim]`.
    pub fn slots(&self, key: Tensor<4>, value: Tensor<4>) -> Tensor<4> {
        Tensor::cat(vec![value, key], 3).select(3, self.slot_order.clone())
    }

    /// Reorders the channels of queries, `[…, head_dim]`, to the order in which a slot stores the key's channels. The caller
    /// must have multiplied the queries by [`query_factor`](Self::query_factor).
    pub fn queries(&self, queries: Tensor<4>) -> Tensor<4> {
        queries.select(3, self.key_order.clone())
    }

    /// Returns the channels of an attention output, `[…, head_dim]`, in the model's order. Attention returns the
    /// channels in the order in which a slot stores the value's channels.
    pub fn channels(&self, read: Tensor<4>) -> Tensor<4> {
        read.select(3, self.value_columns.clone())
    }
}

/// A buffer whose slots hold both keys and values.
#[derive(Clone, Debug)]
pub(crate) struct CompactBuffer {
    /// The slots, `[batch, kv_heads, slots, width]`.
    pub slots: Slots,
    /// The layout of the slots, and the index tensors that reorder channels to this layout and back.
    pub keys: CompactKeys,
}

fn indices(values: Vec<usize>, device: &Device) -> Tensor<1, Int> {
    let count = values.len();
    let values: Vec<i32> = values.into_iter().map(|value| value as i32).collect();
    Tensor::from_data(TensorData::new(values, [count]), device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LayerType;

    const LAYOUT: CompactLayout = CompactLayout {
        head_dim: 12,
        rotated_pairs: 2,
    };

    #[test]
    fn slot_order_shares_the_unrotated_channels() {
        assert_eq!(LAYOUT.width(), 16);
        assert_eq!(LAYOUT.value_order(), [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]);
        let slot = LAYOUT.slot_order();
        assert_eq!(slot[..12], LAYOUT.value_order());
        assert_eq!(slot[12..], [12, 13, 18, 19]);
        let channels: Vec<usize> = slot.iter().map(|channel| channel % 12).collect();
        assert_eq!(channels[4..], LAYOUT.key_order());
    }

    #[test]
    fn value_columns_invert_the_value_order() {
        let order = LAYOUT.value_order();
        for (channel, column) in LAYOUT.value_columns().into_iter().enumerate() {
            assert_eq!(order[column], channel);
        }
    }

    #[test]
    fn layout_of_gemma_4_saves_three_eighths() {
        let expected = CompactLayout {
            head_dim: 512,
            rotated_pairs: 64,
        };
        assert_eq!(expected.width(), 640);
        for config in [Gemma4Config::dense_12b(), Gemma4Config::dense_31b()] {
            for layer in 0..config.num_layers() {
                let full = config.layer_types[layer] == LayerType::Full;
                let layout = CompactLayout::of(&config, layer);
                assert_eq!(layout, full.then_some(expected), "layer {layer}");
            }
        }
        // E2B has separate key and value projections, so it has no compact layout.
        assert_eq!(CompactLayout::of(&Gemma4Config::e2b(), 4), None);
    }
}
