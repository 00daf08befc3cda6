//! The keys and values to which the tokens of packed prompts attend.

use super::intervals::PackedIntervals;
use super::layout::PackedLayout;
#[cfg(feature = "cube")]
use super::tables::GatherTables;
use crate::config::LayerType;
use crate::model::cache::key_values::KeyValues;
use crate::model::cache::slots::Slots;
#[cfg(feature = "cube")]
use crate::op::{in_place::ranges::copy_ranges, serves};
use burn::tensor::Tensor;

/// The place for the keys and values of packed prompts.
pub(crate) struct PackedDestination<'a> {
    intervals: &'a PackedIntervals,
    layout: &'a PackedLayout,
    /// A list with the keys and values of the new tokens of each layer that computes its own, each
    /// `[1, kv_heads, tokens, head_dim]`.
    layers: &'a mut Vec<[Tensor<4>; 2]>,
    #[cfg(feature = "cube")]
    tables: GatherTables,
}

impl<'a> PackedDestination<'a> {
    /// Creates the place for all layers that compute their own keys and values. `layers` must be empty.
    pub fn new(
        layout: &'a PackedLayout,
        intervals: &'a PackedIntervals,
        layers: &'a mut Vec<[Tensor<4>; 2]>,
    ) -> Self {
        Self {
            intervals,
            layout,
            layers,
            #[cfg(feature = "cube")]
            tables: GatherTables::default(),
        }
    }

    /// Keeps the keys and values of the next layer that computes its own. Returns the keys and values that the layer's
    /// queries attend to: those of all prefixes, then those of the new tokens.
    pub fn extend(&mut self, kind: LayerType, key: Tensor<4>, value: Tensor<4>) -> KeyValues {
        let layer = self.layers.len();
        let new = [key, value];
        self.layers.push(new.clone());
        let [key, value] = match self.layout.prefixes().is_empty() {
            true => new,
            false => self.after_prefixes(layer, kind, new),
        };
        let visible = self.intervals.visible(kind);
        KeyValues::new(Slots::Whole(key), Slots::Whole(value), visible)
    }

    /// Copies the keys and values of all prefixes, and after them those of the new tokens, to new tensors.
    fn after_prefixes(
        &mut self,
        layer: usize,
        #[cfg_attr(not(feature = "cube"), expect(unused_variables))] kind: LayerType,
        new: [Tensor<4>; 2],
    ) -> [Tensor<4>; 2] {
        let prefixes = self.layout.prefixes().iter();
        let prefixes = prefixes.map(|prefix| prefix.rows(layer));
        #[cfg(feature = "cube")]
        if let [key, _] = &new
            && let (device, dtype) = (key.device(), key.dtype())
            && serves(&device, dtype)
        {
            let prefixes: Vec<_> = prefixes.collect();
            let rows: usize = prefixes.iter().map(|prefix| prefix.count).sum();
            let [one, heads, count, width] = key.dims();
            // Allocate a flat tensor, because CUDA's allocator would pad the rows of small heads.
            let joined = [(); 2].map(|()| {
                let elements = heads * (rows + count) * width;
                let flat = Tensor::<1>::empty([elements], (&device, dtype));
                flat.reshape([one, heads, rows + count, width])
            });
            let tables = self.tables.of(kind, &prefixes, count, &device);
            let sources = prefixes.into_iter().map(|prefix| prefix.key_values);
            for (source, table) in sources.chain([new]).zip(tables) {
                if let Some(table) = table {
                    copy_ranges(joined.clone(), source, table);
                }
            }
            return joined;
        }
        let mut parts = [Vec::new(), Vec::new()];
        for prefix in prefixes.filter(|prefix| prefix.count > 0) {
            for (parts, more) in parts.iter_mut().zip(prefix.parts()) {
                parts.extend(more);
            }
        }
        for (parts, new) in parts.iter_mut().zip(new) {
            parts.push(new);
        }
        parts.map(|parts| Tensor::cat(parts, 2))
    }
}
