//! The columns of a cache by layer, out of its buffers and into them again.

use super::{
    Cache, Store,
    buffers::{Buffers, extended},
    compact::{CompactBuffer, CompactKeys},
    slots::Slots,
};
use crate::{Gemma4Config, Gemma4Model};
use burn::tensor::Tensor;
use std::collections::BTreeMap;

/// What a layer's keys or values, or both, are called, and their shape.
pub(crate) struct Columns {
    pub name: String,
    /// `[1, kv_heads, columns, head_dim]`.
    pub shape: [usize; 4],
}

impl Cache {
    /// All columns of full layers, by name.
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

    /// What [`columns_of_layers`](Self::columns_of_layers) are with so many columns.
    pub(crate) fn expected_columns(&self, config: &Gemma4Config, columns: usize) -> Vec<Columns> {
        let mut expected = Vec::new();
        for (layer, store) in self.stores.iter().enumerate() {
            let shape = |width| [1, config.key_value_heads(layer), columns, width];
            let mut add = |what, width| {
                expected.push(Columns {
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

    /// What rings are that have kept so many columns.
    pub(crate) fn expected_rings(
        &self,
        config: &Gemma4Config,
        prefix: &str,
        kept: usize,
    ) -> Vec<Columns> {
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
                ["key", "value"].map(|what| Columns {
                    name: format!("{prefix}.{layer}.{what}"),
                    shape,
                })
            })
            .collect()
    }

    /// Whether rings may have kept so many columns of these.
    pub(crate) fn may_keep(&self, columns: usize, kept: usize) -> bool {
        let window = self.window - 1;
        let most = window + self.spare;
        kept <= columns.min(most) && (kept == columns || kept >= window)
    }

    /// Fills the full layers of an empty cache.
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

    /// Gives rings slots that have kept none of the columns that were read: those of a window of one column.
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

    /// What rings have kept, by layer.
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
