//! Copies of packed prompts to the buffers of KV caches.

use super::layout::PackedLayout;
#[cfg(feature = "cube")]
use super::tables::ScatterTables;
#[cfg(feature = "cube")]
use crate::config::LayerType;
#[cfg(feature = "cube")]
use crate::model::cache::buffers::capacity;
use crate::model::cache::{
    Cache, Store,
    buffers::{Buffers, write_ring},
    slots::Slots,
};
#[cfg(feature = "cube")]
use crate::op::{in_place::ranges::copy_ranges, serves};
use burn::tensor::Tensor;

/// The keys and values that one forward pass computed for several prompts.
#[derive(Clone, Debug)]
pub(crate) struct PackedKeyValues {
    /// The keys and values of the new tokens of each layer that computes its own, `[1, kv_heads, tokens, head_dim]`
    /// each. The tokens of the prompts lie one after another.
    pub layers: Vec<[Tensor<4>; 2]>,
    /// The tokens of each prompt, and the prefixes from which the prompts continue.
    pub layout: PackedLayout,
}

impl PackedKeyValues {
    /// Returns the keys and values of one prompt in a layer that computes its own: those of the prefix that the next
    /// query saw, then those of the new tokens. Each tensor is `[1, kv_heads, length, head_dim]`.
    fn of_prompt(&self, prompt: usize, layer: usize) -> [Tensor<4>; 2] {
        let new = self.layout.new_rows(prompt);
        let prefix = self.layout.prefix(prompt).map(|prefix| prefix.rows(layer));
        let prefix = prefix.filter(|prefix| prefix.count > 0);
        let mut parts = prefix.map_or([Vec::new(), Vec::new()], |prefix| prefix.parts());
        for (parts, rows) in parts.iter_mut().zip(&self.layers[layer]) {
            parts.push(rows.clone().narrow(2, new.start, new.len()));
        }
        parts.map(|parts| Tensor::cat(parts, 2))
    }
}

impl Cache {
    /// Fills an empty cache of one sequence with the keys and values of one of several packed prompts. The cache shares
    /// no memory with `packed` on devices that write in place.
    ///
    /// # Panics
    /// Panics if the cache is not empty, or does not store keys and values as the model computes them.
    pub(crate) fn fill_from_packed(&mut self, packed: &PackedKeyValues, prompt: usize) {
        assert!(self.is_empty(), "the cache has no tokens");
        let (count, ring_slots) = (packed.layout.tokens(prompt), self.ring_slots());
        #[cfg(feature = "cube")]
        if let Some([key, _]) = packed.layers.first()
            && serves(&key.device(), key.dtype())
        {
            for (store, [key, value]) in self.stores.iter_mut().zip(&packed.layers) {
                let (buffers, slots) = match store {
                    Store::Ring(buffers) => (buffers, ring_slots),
                    Store::Growing(buffers) => (buffers, capacity(count)),
                    Store::Compact(..) => panic!("{SEPARATE}"),
                };
                let [key, value] = [key, value].map(|rows| Slots::Whole(rows.clone()));
                *buffers = Some(Buffers::empty(&key, &value, slots));
            }
            self.overwrite_rows(packed, &[(prompt, 0)]);
            self.advance_by(count);
            return;
        }
        for (layer, store) in self.stores.iter_mut().enumerate() {
            let [key, value] = packed.of_prompt(prompt, layer);
            let first = count - key.dims()[2];
            let [key, value] = [key, value].map(Slots::Whole);
            match store {
                Store::Ring(ring) => {
                    let empty = Buffers::empty(&key, &value, ring_slots);
                    *ring = Some(empty.map(key, value, |old, new| write_ring(old, new, first)));
                }
                Store::Growing(buffers) => {
                    *buffers = Some(Buffers::extended(None, key, value, 0));
                }
                Store::Compact(..) => panic!("{SEPARATE}"),
            }
        }
        self.advance_by(count);
    }

    /// Copies packed prompts to rows of the buffers, in place, with one launch per layer, and one more for each prefix
    /// from which the prompts continue. `rows` has the index and the buffer row of each prompt to copy. A captured CUDA
    /// graph that reads the buffers stays valid.
    ///
    /// # Panics
    /// Panics if the cache has no buffers, or if its full-attention layers have fewer slots than a prompt has tokens.
    #[cfg(feature = "cube")]
    pub(crate) fn overwrite_rows(&self, packed: &PackedKeyValues, rows: &[(usize, usize)]) {
        let Some([key, _]) = packed.layers.first() else {
            return;
        };
        let layout = &packed.layout;
        let longest = rows.iter().map(|(prompt, _)| layout.tokens(*prompt)).max();
        let mut tables = ScatterTables::new(layout, rows, key.device());
        for (layer, (store, new)) in self.stores.iter().zip(&packed.layers).enumerate() {
            let (kind, buffers) = match store {
                Store::Ring(Some(buffers)) => (LayerType::Sliding, buffers),
                Store::Growing(Some(buffers)) => (LayerType::Full, buffers),
                Store::Ring(None) | Store::Growing(None) => panic!("the cache has buffers"),
                Store::Compact(..) => panic!("{SEPARATE}"),
            };
            let [_, _, slots, _] = buffers.key.dims();
            assert!(
                kind == LayerType::Sliding || longest <= Some(slots),
                "the buffers have a slot for each token"
            );
            let prefixes: Vec<_> = layout
                .prefixes()
                .iter()
                .map(|one| one.rows(layer))
                .collect();
            let tables = tables.of(kind, slots, &prefixes);
            let sources = prefixes.into_iter().map(|prefix| prefix.key_values);
            for (source, table) in sources.chain([new.clone()]).zip(tables) {
                if let Some(table) = table {
                    copy_ranges(whole(buffers), source, table);
                }
            }
        }
    }

    /// Appends the keys and values of new tokens, with one element per layer that computes its own. Each tensor is
    /// `[1, kv_heads, count, head_dim]`. The cache must store keys and values as the model computes them.
    #[cfg(feature = "cube")]
    pub(crate) fn append(&mut self, count: usize, key_values: Vec<[Tensor<4>; 2]>) {
        let (past, ring_slots) = (self.columns, self.ring_slots());
        for (store, [key, value]) in self.stores.iter_mut().zip(key_values) {
            let (key, value) = (Slots::Whole(key), Slots::Whole(value));
            match store {
                Store::Ring(ring) => {
                    let old = ring.take();
                    let old = old.unwrap_or_else(|| Buffers::empty(&key, &value, ring_slots));
                    *ring = Some(old.map(key, value, |old, new| write_ring(old, new, past)));
                }
                Store::Growing(store) => {
                    *store = Some(Buffers::extended(store.take(), key, value, past));
                }
                Store::Compact(..) => panic!("{SEPARATE}"),
            }
        }
        self.advance_by(count);
    }
}

/// The message of the panic if a cache with compact keys gets separate keys and values.
const SEPARATE: &str = "the cache has separate buffers of keys and values";

/// Returns the tensors of buffers that store keys and values as the model computes them.
#[cfg(feature = "cube")]
fn whole(buffers: &Buffers) -> [Tensor<4>; 2] {
    [&buffers.key, &buffers.value].map(|slots| slots.clone().numbers())
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::config::Gemma4Config;
    use crate::model::Gemma4Model;
    use crate::model::cache::kind::CacheKind;
    use crate::model::cache::prefix::Prefix;
    use crate::model::packed_prompts::PackedTokens;
    use burn::tensor::{Device, DeviceKind};
    use std::sync::Arc;

    /// The number of new tokens of each prompt. The window has 5 tokens, so some prompts are longer than the ring
    /// buffers.
    const LENGTHS: [usize; 5] = [3, 5, 12, 1, 9];

    /// The number of tokens of the prefix from which each prompt continues.
    const EARLIER: [usize; 5] = [3, 0, 11, 11, 3];

    fn model() -> Gemma4Model {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let config = Gemma4Config {
            vocab_size: 60,
            hidden_size: 32,
            intermediate_size: 64,
            layer_types: vec![LayerType::Sliding, LayerType::Full],
            num_attention_heads: 2,
            sliding_head_dim: 16,
            global_head_dim: 32,
            num_kv_shared_layers: 0,
            hidden_size_per_layer_input: 0,
            sliding_window: 5,
            ..Gemma4Config::e2b()
        };
        Gemma4Model::new(&config, &device)
    }

    /// Runs prompts that continue from prefixes of [`EARLIER`] tokens.
    fn packed(model: &Gemma4Model) -> PackedKeyValues {
        let prompts = LENGTHS.map(|length| vec![7; length]);
        let prefix = |count| {
            let tokens = PackedTokens {
                prefix: None,
                new: &[9; 11][..count],
            };
            let mut cache = model.cache(vec![0]);
            cache.fill_from_packed(&model.hidden_of_packed(&[tokens]).1, 0);
            Prefix::new(Arc::new(cache), count, None)
        };
        let prefixes = [3, 11].map(prefix);
        let prompts = prompts
            .iter()
            .zip(EARLIER)
            .map(|(new, earlier)| PackedTokens {
                prefix: prefixes.iter().find(|prefix| prefix.len() == earlier),
                new,
            });
        model.hidden_of_packed(&prompts.collect::<Vec<_>>()).1
    }

    fn buffers(cache: &Cache) -> Vec<Tensor<4>> {
        let buffers = cache.stores.iter().flat_map(|store| match store {
            Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => whole(buffers),
            _ => panic!("the cache has separate buffers"),
        });
        buffers.collect()
    }

    fn floats(tensor: Tensor<4>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    /// The number of tokens of a prompt.
    fn length(prompt: usize) -> usize {
        EARLIER[prompt] + LENGTHS[prompt]
    }

    /// Returns the first slots of each buffer of one prompt, whose new keys and values were appended without the
    /// kernel to a copy of the prefix.
    fn appended(model: &Gemma4Model, packed: &PackedKeyValues, prompt: usize) -> Vec<Tensor<4>> {
        let prefix = packed.layout.prefix(prompt);
        let mut cache = prefix.map_or_else(
            || model.cache(vec![0]),
            |prefix| prefix.fork(length(prompt)),
        );
        let rows = packed.layout.new_rows(prompt);
        let new = |rows_of_all: &Tensor<4>| rows_of_all.clone().narrow(2, rows.start, rows.len());
        let layers = packed.layers.iter();
        let layers = layers.map(|layer| layer.each_ref().map(new)).collect();
        cache.append(LENGTHS[prompt], layers);
        let valid = |buffer: Tensor<4>| {
            let slots = length(prompt).min(buffer.dims()[2]);
            buffer.narrow(2, 0, slots)
        };
        buffers(&cache).into_iter().map(valid).collect()
    }

    #[test]
    fn fill_from_packed_equals_append() {
        let model = model();
        let packed = packed(&model);
        for prompt in 0..LENGTHS.len() {
            let mut cache = model.cache(vec![0]);
            cache.fill_from_packed(&packed, prompt);
            assert_eq!(cache.len(), length(prompt));
            let expected = appended(&model, &packed, prompt);
            for (found, expected) in buffers(&cache).into_iter().zip(expected) {
                let found = found.narrow(2, 0, expected.dims()[2]);
                assert_eq!(floats(found), floats(expected), "prompt {prompt}");
            }
        }
    }

    /// The buffers of the batch are NaN before. Only the slots of the copied prompts may change.
    #[test]
    fn overwrite_rows_writes_only_slots_of_its_prompts() {
        let model = model();
        let packed = packed(&model);
        let mut first = model.cache(vec![0]);
        first.fill_from_packed(&packed, 0);
        let mut batch = Cache::ragged(model.config(), CacheKind::default());
        batch.write_row(0, &first, 6);
        for buffer in buffers(&batch) {
            let [_, heads, slots, width] = buffer.dims();
            for row in 0..6 {
                let poison = Tensor::full([1, heads, slots, width], f32::NAN, &buffer.device());
                Slots::Whole(buffer.clone()).overwrite_row(row, Slots::Whole(poison));
            }
        }
        let rows = [(2, 0), (0, 3), (4, 5), (1, 1)];
        batch.overwrite_rows(&packed, &rows);
        for (index, buffer) in buffers(&batch).into_iter().enumerate() {
            for row in 0..6 {
                let found = buffer.clone().narrow(0, row, 1);
                let prompt = rows.iter().find(|(_, other)| *other == row);
                let expected =
                    prompt.map(|(prompt, _)| appended(&model, &packed, *prompt).remove(index));
                let written = expected.as_ref().map_or(0, |expected| expected.dims()[2]);
                if let Some(expected) = expected {
                    let found = found.clone().narrow(2, 0, written);
                    assert_eq!(floats(found), floats(expected), "buffer {index}, row {row}");
                }
                let slots = found.dims()[2];
                if written < slots {
                    let rest = floats(found.narrow(2, written, slots - written));
                    assert!(rest.iter().all(|x| x.is_nan()), "buffer {index}, row {row}");
                }
            }
        }
    }
}
