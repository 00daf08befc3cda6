//! Copies of the keys and values before a prompt's new tokens. A captured CUDA graph reads these copies, because the
//! buffers of a KV cache are reallocated when they grow.

use super::{
    Cache, Store,
    key_values::{KeyValues, Visible},
    slots::Slots,
};
use crate::config::{Gemma4Config, LayerType};
use crate::model::Gemma4Model;
use crate::op::in_place::rows::overwrite_row;
use crate::op::in_place::slots::{copy_from_ring, write_slots};
use burn::tensor::{Int, Tensor};

/// The keys and values of one sequence's earlier tokens, for each layer that computes its own keys and values. Clones
/// share the memory.
///
/// A sliding layer has `[1, kv_heads, window - 1, head_dim]`: the last tokens in text order. A full-attention layer has
/// `[1, kv_heads, capacity, head_dim]`: token `t` is in slot `t`, and the new tokens follow the earlier ones.
#[derive(Clone, Debug)]
pub(crate) struct History {
    layers: Vec<[Tensor<4>; 2]>,
    capacity: usize,
    kept: usize,
}

/// The new tokens of a call that continues from a [`History`].
pub(crate) struct Continuation<'a> {
    pub history: &'a History,
    /// The number of earlier tokens, `[1]`.
    pub start: &'a Tensor<1, Int>,
    /// The number of earlier and new tokens together, `[1]`, with the padding after the new tokens.
    pub end: &'a Tensor<1, Int>,
    /// The place for the keys and values of the new tokens of each layer, each `[1, kv_heads, positions, head_dim]`.
    pub new: &'a mut Vec<[Tensor<4>; 2]>,
}

impl History {
    /// Allocates the copies. Full-attention layers get `capacity` slots.
    pub fn new(model: &Gemma4Model, capacity: usize) -> Self {
        let config = model.config();
        let (device, dtype) = (model.device(), model.dtype());
        let layers = (0..config.first_shared_layer()).map(|layer| {
            let shape = shape(config, layer, capacity);
            // Allocate a flat tensor, because CUDA's allocator would pad the rows of small heads.
            let count = shape.iter().product::<usize>();
            [(); 2].map(|()| Tensor::<1>::empty([count], (&device, dtype)).reshape(shape))
        });
        Self {
            layers: layers.collect(),
            capacity,
            kept: kept(config),
        }
    }

    /// Returns the size on the device in bytes of a history with `capacity` slots.
    pub fn bytes(model: &Gemma4Model, capacity: usize) -> usize {
        let config = model.config();
        let elements = (0..config.first_shared_layer())
            .map(|layer| 2 * shape(config, layer, capacity).iter().product::<usize>());
        elements.sum::<usize>() * model.dtype().size()
    }

    /// The number of slots of a full-attention layer.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The number of slots of a sliding layer: one less than the window.
    pub fn kept(&self) -> usize {
        self.kept
    }
}

/// Returns the shape of the keys of a layer in a history of `capacity` slots.
fn shape(config: &Gemma4Config, layer: usize, capacity: usize) -> [usize; 4] {
    let slots = match config.layer_types[layer] {
        LayerType::Sliding => kept(config),
        LayerType::Full => capacity,
    };
    let heads = config.key_value_heads(layer);
    [1, heads, slots, config.head_dim(layer)]
}

/// The number of earlier tokens that the next query of a sliding layer sees.
fn kept(config: &Gemma4Config) -> usize {
    let window = config.sliding_window;
    window.min(config.max_position_embeddings) - 1
}

impl Continuation<'_> {
    /// Appends the new keys and values of a layer to its history. Returns the keys and values that the layer's queries
    /// attend to.
    pub fn extend(
        &mut self,
        layer: usize,
        kind: LayerType,
        window: usize,
        key: Tensor<4>,
        value: Tensor<4>,
    ) -> KeyValues {
        self.new.push([key.clone(), value.clone()]);
        let [old_key, old_value] = self.history.layers[layer].clone();
        let (key, value, visible) = match kind {
            LayerType::Sliding => (
                Tensor::cat(vec![old_key, key], 2),
                Tensor::cat(vec![old_value, value], 2),
                Visible::in_order(kind, window),
            ),
            LayerType::Full => (
                write_slots(old_key, key, self.start.clone()),
                write_slots(old_value, value, self.start.clone()),
                Visible {
                    lengths: Some(self.end.clone()),
                    lengths_ahead: true,
                    ..Visible::in_order(kind, window)
                },
            ),
        };
        KeyValues::new(Slots::Whole(key), Slots::Whole(value), visible)
    }
}

impl Cache {
    /// True if the cache has one sequence without padding, with keys and values as the model computes them.
    pub(crate) fn has_one_plain_sequence(&self) -> bool {
        !self.ragged && self.batch() == 1 && !self.is_padded() && self.kind.is_plain()
    }

    /// True if the keys and values of this cache can be copied to a [`History`]. They must be those of
    /// [one plain sequence](Self::has_one_plain_sequence), and fill the window of sliding layers.
    pub(crate) fn fills_history(&self) -> bool {
        self.has_one_plain_sequence() && (2..=self.columns + 1).contains(&self.window)
    }

    /// Copies the keys and values that the next queries see.
    ///
    /// # Panics
    /// Panics if [`fills_history`](Self::fills_history) is false, or if the history has fewer slots than the cache has
    /// tokens.
    pub(crate) fn copy_to(&self, history: &History) {
        assert!(
            self.fills_history() && self.columns <= history.capacity,
            "a history holds the tokens of one sequence"
        );
        let columns = self.columns;
        for (store, [key, value]) in self.stores.iter().zip(&history.layers) {
            match store {
                Store::Ring(Some(ring)) => {
                    let [_, _, kept, _] = key.dims();
                    let [_, _, slots, _] = ring.key.dims();
                    let first = (columns - kept) % slots;
                    copy_from_ring(key, ring.key.clone().numbers(), first);
                    copy_from_ring(value, ring.value.clone().numbers(), first);
                }
                Store::Growing(Some(buffers)) => {
                    let earlier = |slots: &Slots| slots.narrow(2, 0, columns).numbers();
                    overwrite_row(key, 0, earlier(&buffers.key));
                    overwrite_row(value, 0, earlier(&buffers.value));
                }
                Store::Ring(None) | Store::Growing(None) | Store::Compact(..) => {
                    panic!("the cache has tokens, in separate buffers of keys and values")
                }
            }
        }
    }
}
