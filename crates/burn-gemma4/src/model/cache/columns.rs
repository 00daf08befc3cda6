//! The keys and values in each layer's cache as named tensors, in the form that session files store. A column is one token
//! of the text.

use super::{
    Cache, Store,
    buffers::{Buffers, extended},
    compact::{CompactBuffer, CompactKeys},
    slots::Slots,
};
use crate::config::Gemma4Config;
use crate::model::Gemma4Model;
use burn::tensor::Tensor;
use std::collections::BTreeMap;

/// The name and shape of a tensor in a session file. The tensor holds a layer's keys, a layer's values, or a layer's
/// compact slots (keys and values together).
pub(crate) struct CacheColumns {
    pub name: String,
    /// The shape, `[1, kv_heads, columns, head_dim]`. For compact slots the last dimension is the slot's width.
    pub shape: [usize; 4],
}

impl Cache {
    /// Returns the keys and values of all columns (tokens) in the full-attention layers' buffers, with their tensor
    /// names.
    pub(crate) fn columns_of_layers(&self) -> Vec<(String, Slots)> {
        let columns = |buffer: &Slots| buffer.narrow(2, 0, self.columns);
        let mut found = Vec::new();
        for (layer, store) in self.stores.iter().enumerate() {
            match store {
                _ if self.columns == 0 => {}
                Store::Growing(Some(buffers)) => {
                    found.push((name(layer, "key"), columns(&buffers.key)));
                    found.push((name(layer, "value"), columns(&buffers.value)));
                }
                Store::Compact(_, Some(buffer)) => {
                    found.push((name(layer, "slots"), columns(&buffer.slots)));
                }
                Store::Ring(_) | Store::Growing(None) | Store::Compact(_, None) => {}
            }
        }
        found
    }

    /// Returns the names and shapes of the tensors that a session file of `columns` tokens must contain: see
    /// [`columns_of_layers`](Self::columns_of_layers).
    pub(crate) fn expected_columns(
        &self,
        config: &Gemma4Config,
        columns: usize,
    ) -> Vec<CacheColumns> {
        let mut expected = Vec::new();
        for (layer, store) in self.stores.iter().enumerate() {
            let shape = |width| [1, config.key_value_heads(layer), columns, width];
            let mut add = |what, width| {
                expected.push(CacheColumns {
                    name: name(layer, what),
                    shape: shape(width),
                });
            };
            match store {
                _ if columns == 0 => {}
                Store::Growing(_) => {
                    add("key", config.head_dim(layer));
                    add("value", config.head_dim(layer));
                }
                Store::Compact(layout, _) => add("slots", layout.width()),
                Store::Ring(_) => {}
            }
        }
        expected
    }

    /// Returns the names and shapes that the ring buffers' tensors must have in a checkpoint of `kept` tokens.
    pub(crate) fn expected_rings(
        &self,
        config: &Gemma4Config,
        prefix: &str,
        kept: usize,
    ) -> Vec<CacheColumns> {
        let rings = self.stores.iter().enumerate();
        let rings = rings.filter(|(_, store)| kept > 0 && matches!(store, Store::Ring(_)));
        rings
            .flat_map(|(layer, _)| {
                let shape = [
                    1,
                    config.key_value_heads(layer),
                    kept,
                    config.head_dim(layer),
                ];
                ["key", "value"].map(|what| CacheColumns {
                    name: format!("{prefix}.{layer}.{what}"),
                    shape,
                })
            })
            .collect()
    }

    /// True if a checkpoint of a cache with `columns` tokens may hold exactly `kept` tokens of each ring buffer. `kept` must
    /// be `columns`, or at least the `window - 1` tokens that the next query sees. In both cases `kept` may be at most
    /// `window - 1` plus the number of spare slots.
    pub(crate) fn may_keep(&self, columns: usize, kept: usize) -> bool {
        let window = self.window - 1;
        let most = window + self.spare;
        kept <= columns.min(most) && (kept == columns || kept >= window)
    }

    /// Fills the buffers of the full-attention layers from named tensors. The cache must be empty.
    pub(crate) fn fill(&mut self, model: &Gemma4Model, tensors: &mut BTreeMap<String, Slots>) {
        for (layer, store) in self.stores.iter_mut().enumerate() {
            let mut take = |what| {
                let columns = tensors.remove(&name(layer, what))?;
                Some(extended(None, columns, 0))
            };
            match store {
                Store::Ring(_) => {}
                Store::Growing(buffers) => {
                    let both = take("key").zip(take("value"));
                    *buffers = both.map(|(key, value)| Buffers { key, value });
                }
                Store::Compact(layout, buffer) => {
                    let norm = model.layers[layer].self_attn.key_norm();
                    *buffer = take("slots").map(|slots| {
                        let keys = CompactKeys::new(*layout, &norm.weight.val());
                        Box::new(CompactBuffer { slots, keys })
                    });
                }
            }
        }
    }

    /// Allocates the ring buffers that the session file does not contain. A session file omits ring buffers without
    /// tokens.
    pub(crate) fn make_rings(&mut self, model: &Gemma4Model) {
        let (config, slots) = (model.config(), self.ring_slots());
        let (device, dtype) = (model.device(), model.dtype());
        let precision = self.kind.precision;
        for (layer, store) in self.stores.iter_mut().enumerate() {
            if let Store::Ring(ring @ None) = store {
                let heads = config.key_value_heads(layer);
                let shape = [1, heads, slots, config.head_dim(layer)];
                let empty = || Slots::new(Tensor::zeros(shape, (&device, dtype)), precision);
                *ring = Some(Buffers {
                    key: empty(),
                    value: empty(),
                });
            }
        }
    }

    /// Removes the ring buffers' tensors from `tensors`. Returns a list with one entry per layer. The entry is `None`
    /// if `tensors` contains no ring buffer of that layer.
    pub(crate) fn rings_of(
        &self,
        prefix: &str,
        tensors: &mut BTreeMap<String, Slots>,
    ) -> Vec<Option<Buffers>> {
        let mut of_layer = |layer| {
            let mut take = |what| tensors.remove(&format!("{prefix}.{layer}.{what}"));
            let (key, value) = take("key").zip(take("value"))?;
            Some(Buffers { key, value })
        };
        (0..self.stores.len()).map(&mut of_layer).collect()
    }
}

fn name(layer: usize, what: &str) -> String {
    format!("layers.{layer}.{what}")
}
