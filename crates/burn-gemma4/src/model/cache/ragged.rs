//! Ragged caches, in which each sequence is at its own position. A server's batch uses a ragged cache, because its sequences
//! begin and end at different times (continuous batching).
//!
//! A row of the buffers is one sequence. The token at position `p` is in slot `p` of a full-attention layer, and in slot
//! `p % slots` of a sliding layer's ring buffer. No slot holds padding, so the buffers need not be rotated for the
//! decode kernels (see the module `rotated`). A call adds one token to each sequence. The buffers may have more rows
//! than the cache has sequences.

use super::{
    Cache, Call, Store,
    buffers::{Buffers, capacity},
    compact::CompactBuffer,
    key_values::{KeyValues, Visible},
    kind::CacheKind,
    precision::KvPrecision,
    slots::{Slots, rows},
};
use crate::config::Gemma4Config;
use attention_cube::paged::{Places, append, append_quantized};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// The smallest number of slots that the buffers of full-attention layers gain when they grow.
const GROWTH: usize = 256;

/// The slots to which a call writes the new token of each sequence.
#[derive(Debug)]
pub(super) struct RaggedRows {
    /// The position of each sequence's new token.
    positions: Vec<usize>,
    /// The slots as device tensors, if kernels write the keys and values. `None` if the host writes the keys and values
    /// of one sequence after another.
    on_device: Option<DeviceRows>,
}

/// The arguments of [`append`]: a page table, in which each row of a buffer counts as one page, and the slots of the
/// new tokens. `full` holds the slots in full-attention buffers, and `ring` the slots in ring buffers.
#[derive(Debug)]
struct DeviceRows {
    page_table: Tensor<2, Int>,
    full: Tensor<1, Int>,
    ring: Tensor<1, Int>,
}

impl Cache {
    /// Creates a ragged cache without sequences.
    pub(crate) fn ragged(config: &Gemma4Config, kind: CacheKind) -> Self {
        Self {
            ragged: true,
            rotated: true,
            ..Self::new(config, Vec::new(), kind)
        }
    }

    /// The number of tokens of each sequence.
    pub(crate) fn lengths(&self) -> Vec<usize> {
        let length = |padding: &usize| self.columns - padding;
        self.padding.iter().map(length).collect()
    }

    /// Sets the number of sequences and their lengths. The buffers must hold the tokens of these lengths already.
    pub(crate) fn set_lengths(&mut self, lengths: &[usize]) {
        let longest = lengths.iter().copied().max().unwrap_or(0);
        self.columns = longest;
        self.written = longest;
        self.padding = lengths.iter().map(|length| longest - length).collect();
    }

    /// Copies the only sequence of `other` to `row`. Allocates buffers of `capacity` rows if the cache has no buffers yet.
    pub(crate) fn write_row(&mut self, row: usize, other: &Self, capacity: usize) {
        let tokens = other.columns;
        self.ensure_slots(tokens);
        for (store, other) in self.stores.iter_mut().zip(&other.stores) {
            match (store, other) {
                (Store::Ring(store), Store::Ring(Some(new))) => {
                    put_buffers(store, new, row, capacity, new.key.dims()[2]);
                }
                (Store::Growing(store), Store::Growing(Some(new))) => {
                    put_buffers(store, new, row, capacity, tokens);
                }
                (Store::Compact(_, store), Store::Compact(_, Some(new))) => {
                    let old = store.take().map(|buffer| buffer.slots);
                    *store = Some(Box::new(CompactBuffer {
                        slots: put(old, &new.slots, row, capacity, tokens),
                        keys: new.keys.clone(),
                    }));
                }
                _ => panic!("both caches belong to one model, and `other` is not empty"),
            }
        }
        self.ensure_slots(tokens);
    }

    /// True if the buffers have slots for a sequence of `tokens` tokens, so that [`overwrite_row`](Self::overwrite_row)
    /// can copy the sequence.
    #[cfg(feature = "cube")]
    pub(crate) fn has_slots_for(&self, tokens: usize) -> bool {
        tokens <= self.room
    }

    /// Copies the only sequence of `other` to `row`, in place. A captured CUDA graph that reads the buffers stays valid.
    #[cfg(feature = "cube")]
    pub(crate) fn overwrite_row(&self, row: usize, other: &Self) {
        let tokens = other.columns;
        let overwrite = |old: &Slots, new: &Slots, slots: usize| {
            old.overwrite_row(row, new.narrow(2, 0, slots));
        };
        for (store, other) in self.stores.iter().zip(&other.stores) {
            match (store, other) {
                (Store::Ring(Some(old)), Store::Ring(Some(new))) => {
                    let slots = new.key.dims()[2];
                    overwrite(&old.key, &new.key, slots);
                    overwrite(&old.value, &new.value, slots);
                }
                (Store::Growing(Some(old)), Store::Growing(Some(new))) => {
                    overwrite(&old.key, &new.key, tokens);
                    overwrite(&old.value, &new.value, tokens);
                }
                (Store::Compact(_, Some(old)), Store::Compact(_, Some(new))) => {
                    overwrite(&old.slots, &new.slots, tokens);
                }
                _ => panic!("both caches belong to one model, and neither is empty"),
            }
        }
    }

    /// Copies row `from` of all buffers to row `to`.
    pub(crate) fn move_row(&mut self, from: usize, to: usize) {
        self.for_each_buffer(|buffer, _| {
            let slots = buffer.dims()[2];
            let copy = copied_row(buffer, from);
            replace(buffer, |buffer| {
                buffer.assign(to..to + 1, 0..slots, copy.clone())
            });
        });
    }

    /// Reallocates the buffers with `capacity` rows, one row per sequence, and copies the first `kept` rows. The buffers of
    /// full-attention layers shrink to the slots that the longest sequence needs.
    pub(crate) fn set_capacity(&mut self, capacity: usize, kept: usize) {
        let longest = self.columns;
        self.for_each_buffer(|buffer, is_ring| {
            let old = buffer.dims()[2];
            let slots = match is_ring {
                true => old,
                false => old.min(Self::largest_slots(longest)),
            };
            let new = with_rows(buffer, capacity, slots);
            *buffer = match kept {
                0 => new,
                _ => {
                    let rows = buffer.narrow(0, 0, kept).narrow(2, 0, slots);
                    new.assign(0..kept, 0..slots, rows)
                }
            };
        });
        self.ensure_slots(longest);
    }

    /// The largest number of slots per sequence in the buffers of full-attention layers, if sequences have up to `tokens`
    /// tokens.
    pub(crate) fn largest_slots(tokens: usize) -> usize {
        capacity(tokens.saturating_add((tokens / 8).max(GROWTH)))
    }

    /// Enlarges the buffers of full-attention layers, if necessary, so that each sequence has at least `columns` slots.
    pub(crate) fn ensure_slots(&mut self, columns: usize) {
        let mut slots = usize::MAX;
        self.for_each_buffer(|buffer, is_ring| {
            if !is_ring {
                slots = slots.min(buffer.dims()[2]);
            }
        });
        if columns > slots {
            let ahead = Self::largest_slots(columns);
            self.for_each_buffer(|buffer, is_ring| {
                let old = buffer.dims()[2];
                if !is_ring && old < ahead {
                    let [rows, ..] = buffer.dims();
                    *buffer = buffer.empty(ahead).assign(0..rows, 0..old, buffer.clone());
                }
            });
            #[cfg(feature = "cube")]
            {
                slots = ahead;
            }
        }
        #[cfg(feature = "cube")]
        {
            self.room = match slots {
                usize::MAX => columns,
                slots => slots,
            };
        }
    }

    /// Calls `visit` with each buffer of keys or values. The second argument of `visit` is true for a ring buffer.
    fn for_each_buffer(&mut self, mut visit: impl FnMut(&mut Slots, bool)) {
        for store in &mut self.stores {
            let is_ring = matches!(store, Store::Ring(_));
            match store {
                Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => {
                    visit(&mut buffers.key, is_ring);
                    visit(&mut buffers.value, is_ring);
                }
                Store::Compact(_, Some(buffer)) => visit(&mut buffer.slots, false),
                Store::Ring(None) | Store::Growing(None) | Store::Compact(_, None) => {}
            }
        }
    }

    /// Returns the data that all layers share in a call that adds one token to every sequence. `runs_kernels` is true
    /// if the device runs CubeCL kernels.
    pub(super) fn ragged_call(&self, device: &Device, runs_kernels: bool) -> Call {
        let (positions, ring) = (self.lengths(), self.ring_slots());
        let visible = |most: usize| {
            let lengths = positions.iter().map(|position| (position + 1).min(most));
            Visible {
                lengths: Some(integers(lengths, device)),
                ..Visible::default()
            }
        };
        let (sliding, full) = (visible(self.window), visible(usize::MAX));
        let on_device = runs_kernels.then(|| DeviceRows {
            page_table: integers(0..positions.len(), device).unsqueeze_dim(1),
            full: integers(positions.iter().copied(), device),
            ring: integers(positions.iter().map(|position| position % ring), device),
        });
        Call {
            past: self.columns,
            count: 1,
            sliding,
            full,
            rows: Some(RaggedRows {
                positions,
                on_device,
            }),
        }
    }

    /// Writes the new key and value of each sequence to the buffers of a layer. Returns the keys and values that the layer's
    /// queries attend to.
    pub(super) fn extend_ragged(
        &mut self,
        layer: usize,
        key: Tensor<4>,
        value: Tensor<4>,
        call: &Call,
        new: &RaggedRows,
    ) -> KeyValues {
        const ALLOCATED: &str = "a ragged cache has buffers, because `write_row` allocates them";
        let (batch, precision) = (self.batch(), self.kind.precision);
        let longest = capacity_on(new, self.columns + 1);
        match &mut self.stores[layer] {
            Store::Ring(store) => {
                let buffers = store.take().expect(ALLOCATED);
                let buffers = Buffers {
                    key: new.write(buffers.key, key, true, precision),
                    value: new.write(buffers.value, value, true, precision),
                };
                let read = Buffers {
                    key: first_rows(&buffers.key, batch, None),
                    value: first_rows(&buffers.value, batch, None),
                };
                *store = Some(buffers);
                read.read(call.sliding.clone())
            }
            Store::Growing(store) => {
                let buffers = store.take().expect(ALLOCATED);
                let buffers = Buffers {
                    key: new.write(buffers.key, key, false, precision),
                    value: new.write(buffers.value, value, false, precision),
                };
                let read = Buffers {
                    key: first_rows(&buffers.key, batch, longest),
                    value: first_rows(&buffers.value, batch, longest),
                };
                *store = Some(buffers);
                read.read(call.full.clone())
            }
            Store::Compact(_, store) => {
                let CompactBuffer { slots, keys } = *store.take().expect(ALLOCATED);
                let slots = new.write(slots, keys.slots(key, value), false, precision);
                let read = first_rows(&slots, batch, longest);
                let read = KeyValues::of_slots(&read, &keys, call.full.clone());
                *store = Some(Box::new(CompactBuffer { slots, keys }));
                read
            }
        }
    }
}

impl RaggedRows {
    /// Writes the new token of each sequence to the token's slot in `buffer`. `new` is
    /// `[sequences, kv_heads, 1, width]`.
    fn write(&self, buffer: Slots, new: Tensor<4>, is_ring: bool, precision: KvPrecision) -> Slots {
        if let Some(on_device) = &self.on_device {
            return on_device.write(buffer, new, is_ring);
        }
        let new = Slots::new(new, precision);
        let slots = buffer.dims()[2];
        let positions = self.positions.iter().enumerate();
        positions.fold(buffer, |buffer, (row, position)| {
            let slot = match is_ring {
                true => position % slots,
                false => *position,
            };
            buffer.assign(row..row + 1, slot..slot + 1, new.narrow(0, row, 1))
        })
    }
}

impl DeviceRows {
    fn write(&self, buffer: Slots, new: Tensor<4>, is_ring: bool) -> Slots {
        let places = Places {
            page_table: self.page_table.clone(),
            starts: match is_ring {
                true => self.ring.clone(),
                false => self.full.clone(),
            },
            counts: None,
        };
        let written = match buffer {
            Slots::Whole(numbers) => append(numbers, new, places).map(Slots::Whole),
            Slots::Q8 { words, scales } => {
                append_quantized(rows(words, scales), new, places).map(|rows| {
                    let (words, scales) = rows.into_parts();
                    let scales = scales.unsqueeze_dim(3);
                    Slots::Q8 { words, scales }
                })
            }
        };
        // `append` returns an error for tensors of the wrong shape or for an unsupported device. The code above builds
        // tensors of the right shape, and attention has run on this device before.
        written.unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Returns the number of slots that a full-attention layer passes to attention, or `None` for the whole buffer. On
/// CubeCL devices the layer passes the whole buffer without a copy, and the attention kernels stop at each sequence's
/// length.
fn capacity_on(new: &RaggedRows, columns: usize) -> Option<usize> {
    const STEP: usize = 64;
    let on_host = new.on_device.is_none();
    on_host.then(|| columns.next_multiple_of(STEP))
}

fn first_rows(buffer: &Slots, rows: usize, slots: Option<usize>) -> Slots {
    let [allocated, _, all, _] = buffer.dims();
    let read = match rows < allocated {
        true => buffer.narrow(0, 0, rows),
        false => buffer.clone(),
    };
    match slots.filter(|slots| *slots < all) {
        Some(slots) => read.narrow(2, 0, slots),
        None => read,
    }
}

/// Copies the keys and values of one sequence to `row`.
fn put_buffers(
    store: &mut Option<Buffers>,
    new: &Buffers,
    row: usize,
    capacity: usize,
    slots: usize,
) {
    let (key, value) = match store.take() {
        Some(Buffers { key, value }) => (Some(key), Some(value)),
        None => (None, None),
    };
    *store = Some(Buffers {
        key: put(key, &new.key, row, capacity, slots),
        value: put(value, &new.value, row, capacity, slots),
    });
}

/// Copies the first `count` slots of `new`, a buffer of one sequence, to `row`. A missing buffer is allocated with `rows`
/// rows.
fn put(old: Option<Slots>, new: &Slots, row: usize, rows: usize, count: usize) -> Slots {
    let buffer = old.unwrap_or_else(|| with_rows(new, rows, new.dims()[2]));
    buffer.assign(row..row + 1, 0..count, new.narrow(2, 0, count))
}

/// Allocates an uninitialized buffer of `rows` rows and `slots` slots. The format, number of heads and width are those
/// of the buffer `like`.
fn with_rows(like: &Slots, rows: usize, slots: usize) -> Slots {
    let one = like.narrow(0, 0, 1).empty(rows * slots);
    let [_, heads, _, width] = like.dims();
    let shape = |width: usize| [rows, heads, slots, width];
    match one {
        Slots::Whole(numbers) => Slots::Whole(numbers.reshape(shape(width))),
        Slots::Q8 { words, scales } => {
            let [.., packed] = words.dims();
            Slots::Q8 {
                words: words.reshape(shape(packed)),
                scales: scales.reshape(shape(1)),
            }
        }
    }
}

/// Copies a row to new memory. The copy has only one handle, so later writes happen in place.
fn copied_row(buffer: &Slots, row: usize) -> Slots {
    let slots = buffer.dims()[2];
    let row = buffer.narrow(0, row, 1);
    // Allocate one slot more than needed, so that the assignment does not cover the whole tensor. An assignment that
    // covers the whole tensor would return a view of `buffer` instead of a copy.
    let copy = row.empty(slots + 1).assign(0..1, 0..slots, row);
    copy.narrow(2, 0, slots)
}

/// Replaces a buffer by the result of `write`. `write` receives the only handle to the buffer's memory.
fn replace(buffer: &mut Slots, write: impl FnOnce(Slots) -> Slots) {
    let placeholder = buffer.narrow(0, 0, 1).empty(1);
    let owned = std::mem::replace(buffer, placeholder);
    *buffer = write(owned);
}

fn integers(values: impl ExactSizeIterator<Item = usize>, device: &Device) -> Tensor<1, Int> {
    let values: Vec<i32> = values.map(|value| value as i32).collect();
    let shape = [values.len()];
    Tensor::from_data(TensorData::new(values, shape), (device, DType::I32))
}
