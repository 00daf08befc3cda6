//! The keys and values of packed prompts, the keys that each of their tokens sees, and copies to the buffers of KV
//! caches.

use super::{
    Cache, Store,
    buffers::{Buffers, capacity, write_ring},
    key_values::{KeyValues, Visible},
    slots::Slots,
};
use crate::config::{Gemma4Config, LayerType};
#[cfg(feature = "cube")]
use crate::op::{in_place::packed::write_packed, serves};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// The keys and values that one forward pass computed for several prompts.
#[derive(Clone, Debug)]
pub(crate) struct PackedKeyValues {
    /// The keys and values of each layer that computes its own, each `[1, kv_heads, tokens, head_dim]`. The tokens of
    /// the prompts lie one after another.
    pub layers: Vec<[Tensor<4>; 2]>,
    /// The tokens of each prompt.
    pub ranges: Vec<Range<usize>>,
}

/// The keys that the tokens of packed prompts see, as an interval of the packed rows for each token. All tensors are
/// `[1, tokens]`.
pub(crate) struct PackedIntervals {
    /// The first key that each token sees in sliding layers.
    sliding_start: Tensor<2, Int>,
    /// The first key that each token sees in full-attention layers: the first token of its prompt.
    full_start: Tensor<2, Int>,
    /// The first key after those that each token sees: the key after its own.
    end: Tensor<2, Int>,
}

/// The place for the keys and values of packed prompts.
pub(crate) struct PackedDestination<'a> {
    pub intervals: &'a PackedIntervals,
    /// A list with the keys and values of each layer that computes its own, each `[1, kv_heads, tokens, head_dim]`.
    pub layers: &'a mut Vec<[Tensor<4>; 2]>,
}

impl PackedIntervals {
    /// Returns the intervals of the tokens with the indices `offsets` in the prompts, whose rows are `ranges`.
    pub fn new<'a>(
        ranges: &'a [Range<usize>],
        offsets: impl Fn(&Range<usize>) -> Range<usize> + 'a,
        window: usize,
        device: &Device,
    ) -> Self {
        let tokens = || {
            let of_prompt = |range: &'a Range<usize>| {
                offsets(range).map(|offset| (range.start, range.start + offset + 1))
            };
            ranges.iter().flat_map(of_prompt)
        };
        let bounds = |bounds: Vec<i32>| {
            let shape = [1, bounds.len()];
            Tensor::from_data(TensorData::new(bounds, shape), (device, DType::I32))
        };
        let in_window = |(start, end): (usize, usize)| start.max(end.saturating_sub(window)) as i32;
        Self {
            sliding_start: bounds(tokens().map(in_window).collect()),
            full_start: bounds(tokens().map(|(start, _)| start as i32).collect()),
            end: bounds(tokens().map(|(_, end)| end as i32).collect()),
        }
    }

    /// Returns the rules of a layer of type `kind`.
    pub fn visible(&self, kind: LayerType) -> Visible {
        let start = match kind {
            LayerType::Sliding => &self.sliding_start,
            LayerType::Full => &self.full_start,
        };
        Visible {
            interval: Some([start.clone(), self.end.clone()]),
            ..Visible::default()
        }
    }
}

impl PackedDestination<'_> {
    /// Keeps the keys and values of a layer. Returns the keys and values that the layer's queries attend to.
    pub fn extend(&mut self, kind: LayerType, key: Tensor<4>, value: Tensor<4>) -> KeyValues {
        self.layers.push([key.clone(), value.clone()]);
        let visible = self.intervals.visible(kind);
        KeyValues::new(Slots::Whole(key), Slots::Whole(value), visible)
    }
}

impl PackedKeyValues {
    /// Returns the keys and values of one prompt, for each layer that computes its own. Each tensor is
    /// `[1, kv_heads, length, head_dim]`.
    fn of_prompt(&self, prompt: usize) -> Vec<[Tensor<4>; 2]> {
        let range = &self.ranges[prompt];
        let part = |rows: &Tensor<4>| rows.clone().narrow(2, range.start, range.len());
        let layers = self.layers.iter();
        layers.map(|layer| layer.each_ref().map(part)).collect()
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
        let count = packed.ranges[prompt].len();
        let layers = packed.of_prompt(prompt);
        #[cfg(feature = "cube")]
        if let Some([key, _]) = layers.first()
            && serves(&key.device(), key.dtype())
        {
            let mut places = PlaceTables::new(key.device(), |slots| {
                slots_of_prompt(count, slots, 0).collect()
            });
            let ring_slots = self.ring_slots();
            for (store, sources) in self.stores.iter_mut().zip(layers) {
                let (buffers, slots) = match store {
                    Store::Ring(buffers) => (buffers, ring_slots),
                    Store::Growing(buffers) => (buffers, capacity(count)),
                    Store::Compact(..) => panic!("{SEPARATE}"),
                };
                let [key, value] = sources.clone().map(Slots::Whole);
                let new = Buffers::empty(&key, &value, slots);
                write_packed(whole(&new), sources, places.of(slots));
                *buffers = Some(new);
            }
            self.advance_by(count);
            return;
        }
        self.append(count, layers);
    }

    /// Returns the size on the device in bytes of this empty cache after
    /// [`fill_from_packed`](Self::fill_from_packed) of a prompt of `count` tokens in `dtype`.
    ///
    /// # Panics
    /// Panics if the cache does not store keys and values as the model computes them.
    pub(crate) fn bytes_of_packed(
        &self,
        config: &Gemma4Config,
        count: usize,
        dtype: DType,
    ) -> usize {
        let elements = self.stores.iter().enumerate().map(|(layer, store)| {
            let slots = match store {
                Store::Ring(_) => self.ring_slots(),
                Store::Growing(_) => capacity(count),
                Store::Compact(..) => panic!("{SEPARATE}"),
            };
            2 * slots * config.key_value_heads(layer) * config.head_dim(layer)
        });
        elements.sum::<usize>() * dtype.size()
    }

    /// Copies packed prompts to rows of the buffers, in place, with one launch per layer. `rows` has the index and the
    /// buffer row of each prompt to copy. A captured CUDA graph that reads the buffers stays valid.
    ///
    /// # Panics
    /// Panics if the cache has no buffers, or if its full-attention layers have fewer slots than a prompt has tokens.
    #[cfg(feature = "cube")]
    pub(crate) fn overwrite_rows(&self, packed: &PackedKeyValues, rows: &[(usize, usize)]) {
        let Some([key, _]) = packed.layers.first() else {
            return;
        };
        let [_, _, tokens, _] = key.dims();
        let mut places = PlaceTables::new(key.device(), |slots| {
            let mut places = vec![NO_SLOT; tokens];
            for (prompt, row) in rows {
                let range = packed.ranges[*prompt].clone();
                let of_prompt = slots_of_prompt(range.len(), slots, *row);
                for (place, slot) in places[range].iter_mut().zip(of_prompt) {
                    *place = slot;
                }
            }
            places
        });
        for (store, sources) in self.stores.iter().zip(&packed.layers) {
            let buffers = match store {
                Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => buffers,
                Store::Ring(None) | Store::Growing(None) => panic!("the cache has buffers"),
                Store::Compact(..) => panic!("{SEPARATE}"),
            };
            let [_, _, slots, _] = buffers.key.dims();
            let longest = rows.iter().map(|(prompt, _)| packed.ranges[*prompt].len());
            assert!(
                matches!(store, Store::Ring(_)) || longest.max() <= Some(slots),
                "the buffers have a slot for each token"
            );
            write_packed(whole(buffers), sources.clone(), places.of(slots));
        }
    }

    /// Appends the keys and values of new tokens, with one element per layer that computes its own. Each tensor is
    /// `[1, kv_heads, count, head_dim]`. The cache must store keys and values as the model computes them.
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

/// The slot of a token that a kernel does not copy.
#[cfg(feature = "cube")]
const NO_SLOT: i32 = -1;

/// Returns the slot of each token of a prompt in a buffer of several rows, counted over all rows. Each row has `slots`
/// slots. Token `t` is in slot `t % slots` of its row, as in a ring buffer. Tokens that later tokens of the prompt
/// would overwrite have no slot.
#[cfg(feature = "cube")]
fn slots_of_prompt(count: usize, slots: usize, row: usize) -> impl Iterator<Item = i32> {
    (0..count).map(move |token| match count - token > slots {
        true => NO_SLOT,
        false => i32::try_from(row * slots + token % slots)
            .expect("the slots of all rows have 32-bit numbers"),
    })
}

/// The slots of packed tokens on the device, for each number of slots that the buffers of a cache have.
#[cfg(feature = "cube")]
struct PlaceTables<F> {
    device: Device,
    compute: F,
    tables: Vec<(usize, Tensor<1, Int>)>,
}

#[cfg(feature = "cube")]
impl<F: Fn(usize) -> Vec<i32>> PlaceTables<F> {
    /// `compute` returns the slots of all tokens in buffers of the given number of slots.
    fn new(device: Device, compute: F) -> Self {
        Self {
            device,
            compute,
            tables: Vec::new(),
        }
    }

    fn of(&mut self, slots: usize) -> Tensor<1, Int> {
        if let Some((_, table)) = self.tables.iter().find(|(other, _)| *other == slots) {
            return table.clone();
        }
        let table = (self.compute)(slots);
        let shape = [table.len()];
        let table = Tensor::from_data(TensorData::new(table, shape), (&self.device, DType::I32));
        self.tables.push((slots, table.clone()));
        table
    }
}

/// Returns the tensors of buffers that store keys and values as the model computes them.
#[cfg(feature = "cube")]
fn whole(buffers: &Buffers) -> [Tensor<4>; 2] {
    [&buffers.key, &buffers.value].map(|slots| slots.clone().numbers())
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use crate::model::Gemma4Model;
    use crate::model::cache::kind::CacheKind;
    use burn::tensor::DeviceKind;

    /// A window of 5 tokens, so that some prompts are longer than the ring buffers.
    const LENGTHS: [usize; 5] = [3, 5, 12, 1, 9];

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

    fn packed(model: &Gemma4Model) -> PackedKeyValues {
        let prompts = LENGTHS.map(|length| vec![7; length]);
        let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        model.hidden_of_packed(&prompts).1
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

    /// Returns the first slots of each buffer of one prompt, whose keys and values were appended without the kernel.
    fn appended(model: &Gemma4Model, packed: &PackedKeyValues, prompt: usize) -> Vec<Tensor<4>> {
        let mut cache = model.cache(vec![0]);
        cache.append(LENGTHS[prompt], packed.of_prompt(prompt));
        let valid = |buffer: Tensor<4>| {
            let slots = LENGTHS[prompt].min(buffer.dims()[2]);
            buffer.narrow(2, 0, slots)
        };
        buffers(&cache).into_iter().map(valid).collect()
    }

    #[test]
    fn fill_from_packed_equals_append() {
        let model = model();
        let packed = packed(&model);
        for (prompt, length) in LENGTHS.into_iter().enumerate() {
            let mut cache = model.cache(vec![0]);
            cache.fill_from_packed(&packed, prompt);
            assert_eq!(cache.len(), length);
            let expected = appended(&model, &packed, prompt);
            for (found, expected) in buffers(&cache).into_iter().zip(expected) {
                let found = found.narrow(2, 0, expected.dims()[2]);
                assert_eq!(floats(found), floats(expected), "{length} tokens");
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

    #[test]
    fn slots_of_prompt_longer_than_a_ring_are_those_of_its_last_tokens() {
        let slots = |count, slots, row| slots_of_prompt(count, slots, row).collect::<Vec<_>>();
        assert_eq!(slots(3, 4, 2), [8, 9, 10]);
        assert_eq!(slots(4, 4, 0), [0, 1, 2, 3]);
        assert_eq!(slots(7, 4, 1), [-1, -1, -1, 7, 4, 5, 6]);
    }
}
