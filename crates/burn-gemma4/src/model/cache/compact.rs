//! Keys and values in one buffer, where both are made of the same projection.
//!
//! There a head's value is the normalised projection `r`, and its key `r` times the weight `w` of the keys' norm, rotated by position.
//! The rotation is of a few of the channels; in all others the key is `w` times the value, so that the query can be
//! multiplied by `w` instead and meet the value itself. Of the key, only the rotated channels are kept:
//!
//! ```text
//! slot     value's rotated   | value's others    | key's rotated
//! values   '-------------------------------------'
//! keys                         '-----------------------------------'
//! ```
//!
//! With Gemma 4's 512 channels, 128 of which are rotated, that is 640 numbers instead of 1024. It is the same mathematics; in half
//! precision it is rounded elsewhere.

use super::slots::{CODES, Slots};
use crate::Gemma4Config;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

/// How a slot is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompactLayout {
    pub head_dim: usize,
    /// Channel `p` is rotated with channel `p + head_dim / 2` for every `p` below.
    pub rotated_pairs: usize,
}

impl CompactLayout {
    /// Of a layer's slots; `None` where a key says more than the value, or nothing is saved.
    pub fn of(config: &Gemma4Config, layer: usize) -> Option<Self> {
        let head_dim = config.head_dim(layer);
        let layout = Self {
            head_dim,
            rotated_pairs: config.global_rope.rotated_pairs(head_dim),
        };
        (config.values_are_keys(layer) && layout.width() < 2 * head_dim).then_some(layout)
    }

    /// Whether keys and values each begin and end with a word of int8.
    pub fn has_words(&self) -> bool {
        self.head_dim.is_multiple_of(CODES) && self.rotated().is_multiple_of(CODES)
    }

    /// Columns of a slot.
    pub fn width(&self) -> usize {
        self.head_dim + self.rotated()
    }

    /// Rotated channels.
    pub fn rotated(&self) -> usize {
        2 * self.rotated_pairs
    }

    /// The channel in each of the values' columns.
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

    /// The channel in each of the keys' columns.
    fn key_order(&self) -> Vec<usize> {
        let mut order = self.value_order();
        order.rotate_left(self.rotated());
        order
    }

    /// What each of a slot's columns has: of a value's channels and then a key's.
    fn slot_order(&self) -> Vec<usize> {
        let mut order = self.value_order();
        order.extend_from_within(..self.rotated());
        for channel in &mut order[self.head_dim..] {
            *channel += self.head_dim;
        }
        order
    }

    /// The values' column that each channel is in.
    fn value_columns(&self) -> Vec<usize> {
        let mut columns = vec![0; self.head_dim];
        for (column, channel) in self.value_order().into_iter().enumerate() {
            columns[channel] = column;
        }
        columns
    }
}

/// What makes slots, and what queries need to read them.
#[derive(Clone, Debug)]
pub(crate) struct CompactKeys {
    pub layout: CompactLayout,
    /// `[head_dim]`: what queries are multiplied by, beside their norm's weight: the keys' where channels are not rotated.
    pub query_factor: Tensor<1>,
    slot_order: Tensor<1, Int>,
    key_order: Tensor<1, Int>,
    value_columns: Tensor<1, Int>,
}

impl CompactKeys {
    /// For keys whose norm has the weight `[head_dim]`.
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

    /// Slots for keys and values, `[batch, kv_heads, positions, head_dim]` each: `[batch, kv_heads, positions, width]`.
    pub fn slots(&self, key: Tensor<4>, value: Tensor<4>) -> Tensor<4> {
        Tensor::cat(vec![value, key], 3).select(3, self.slot_order.clone())
    }

    /// Queries that have been multiplied by [`query_factor`](Self::query_factor), `[…, head_dim]`, in the keys' order.
    pub fn queries(&self, queries: Tensor<4>) -> Tensor<4> {
        queries.select(3, self.key_order.clone())
    }

    /// What queries have read, `[…, head_dim]`, by channels.
    pub fn channels(&self, read: Tensor<4>) -> Tensor<4> {
        read.select(3, self.value_columns.clone())
    }
}

/// Keys and values that share slots.
#[derive(Clone, Debug)]
pub(crate) struct CompactBuffer {
    /// `[batch, kv_heads, slots, width]`.
    pub slots: Slots,
    /// How they are laid out and read.
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
    use crate::LayerType;

    const LAYOUT: CompactLayout = CompactLayout {
        head_dim: 12,
        rotated_pairs: 2,
    };

    #[test]
    fn keys_and_values_share_what_is_not_rotated() {
        assert_eq!(LAYOUT.width(), 16);
        assert_eq!(LAYOUT.value_order(), [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]);
        let slot = LAYOUT.slot_order();
        assert_eq!(slot[..12], LAYOUT.value_order());
        assert_eq!(slot[12..], [12, 13, 18, 19]);
        let channels: Vec<usize> = slot.iter().map(|channel| channel % 12).collect();
        assert_eq!(channels[4..], LAYOUT.key_order());
    }

    #[test]
    fn columns_undo_the_order() {
        let order = LAYOUT.value_order();
        for (channel, column) in LAYOUT.value_columns().into_iter().enumerate() {
            assert_eq!(order[column], channel);
        }
    }

    #[test]
    fn gemma_4_saves_three_eighths() {
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
        // Its values have a projection of their own.
        assert_eq!(CompactLayout::of(&Gemma4Config::e2b(), 4), None);
    }
}
