//! The KV cache: the keys and values of all tokens that the model has processed.
//!
//! A sliding-window layer stores its keys and values in a ring buffer, which holds about one window of tokens. The
//! buffer of a full-attention layer ("full layer") grows in blocks. A shared KV layer reads an earlier layer's keys and
//! values.
//!
//! A column is one position of the padded batch, that is, one token of every sequence. A slot is an index in a buffer.
//! Sequences of a batch are aligned at their ends: a shorter sequence begins with masked padding. For the decode
//! kernels the buffers are rotated, so that slot 0 holds the first token of each sequence.
//!
//! [`forget`](Cache::forget) removes the last columns of a cache. Each ring buffer has one spare slot for every column
//! that may be forgotten. Without the spare slots, new columns would overwrite keys that are needed after a call of
//! `forget`.

mod buffers;
#[cfg(feature = "cube")]
mod capacity;
mod fork;
mod images;
mod ragged;
mod rotated;
mod size;

pub(crate) mod checkpoint;
pub(crate) mod columns;
pub(crate) mod compact;
#[cfg(feature = "cube")]
pub(crate) mod history;
pub(crate) mod key_values;
pub(crate) mod kind;
pub(crate) mod packed;
pub(crate) mod precision;
pub(crate) mod prefix;
#[cfg(feature = "cube")]
pub(crate) mod ring;
pub(crate) mod slots;

use crate::config::{Gemma4Config, LayerType};
use crate::error::Gemma4Error;
use crate::op::rope::Positions;
use buffers::{Buffers, capacity, extended, in_order, parts_in_order, write, write_ring};
use burn::{
    module::Param,
    tensor::{Bool, Device, Int, Tensor, TensorData},
};
#[cfg(feature = "cube")]
pub(crate) use capacity::WriteTarget;
use compact::{CompactBuffer, CompactKeys, CompactLayout};
use key_values::{KeyValues, Visible};
use kind::CacheKind;
use precision::KvPrecision;
use ragged::RaggedRows;
#[cfg(feature = "cube")]
use ring::Ring;
use slots::Slots;

/// The keys and values of a batch of sequences.
#[derive(Debug)]
pub struct Cache {
    /// The buffers of every layer that computes its own keys and values.
    stores: Vec<Store>,
    window: usize,
    /// The model's maximum number of positions.
    #[cfg(feature = "cube")]
    positions: usize,
    /// The number of spare slots in each ring buffer. This is also the largest number of tokens per sequence that can
    /// be forgotten.
    spare: usize,
    /// The current number of columns (tokens of every sequence), including padding and without the forgotten columns.
    columns: usize,
    /// The largest number of columns (tokens of every sequence) that was ever written.
    written: usize,
    /// The number of padding tokens at the beginning of each sequence.
    padding: Vec<usize>,
    kind: CacheKind,
    /// True if slot 0 of each sequence holds the sequence's first token instead of padding: see the module `rotated`.
    rotated: bool,
    /// True if the sequences may have different lengths. Each call then adds one token to every sequence: see the module
    /// `ragged`.
    ragged: bool,
    /// The number of tokens per sequence for which `make_room` has reserved slots in every full-attention layer's buffer.
    #[cfg(feature = "cube")]
    room: usize,
}

/// The buffers of one layer, which are allocated when the first tokens are written.
#[derive(Debug)]
enum Store {
    /// A ring buffer of `window + spare` slots. Column (token) `c` is in slot `c % slots`.
    Ring(Option<Buffers>),
    /// A growing buffer. Column (token) `c` is in slot `c`.
    Growing(Option<Buffers>),
    /// A growing buffer with compact keys. Column (token) `c` is in slot `c`, which holds both key and value.
    Compact(CompactLayout, Option<Box<CompactBuffer>>),
}

/// The data that all layers share in one call of the model.
#[derive(Debug)]
pub(crate) struct Call {
    /// The number of columns (tokens of every sequence) in the cache before the call.
    past: usize,
    /// The number of columns (tokens of every sequence) that the call adds.
    count: usize,
    sliding: Visible,
    full: Visible,
    /// The slots of the new tokens in a ragged cache, or `None` if the cache is not ragged.
    rows: Option<RaggedRows>,
}

impl Cache {
    /// Creates an empty cache for `padding.len()` sequences. Sequence `i` begins with `padding[i]` padding tokens.
    pub(crate) fn new(config: &Gemma4Config, padding: Vec<usize>, kind: CacheKind) -> Self {
        let stores = (0..config.first_shared_layer())
            .map(|layer| {
                let layout = CompactLayout::of(config, layer).filter(|_| kind.compact_keys);
                match (config.layer_types[layer], layout) {
                    (LayerType::Sliding, _) => Store::Ring(None),
                    (LayerType::Full, Some(layout)) => Store::Compact(layout, None),
                    (LayerType::Full, None) => Store::Growing(None),
                }
            })
            .collect();
        Self {
            stores,
            // Limit the window to the model's maximum number of positions, because each key of the window takes a slot.
            window: config.sliding_window.min(config.max_position_embeddings),
            #[cfg(feature = "cube")]
            positions: config.max_position_embeddings,
            spare: 0,
            columns: 0,
            written: 0,
            padding,
            kind,
            rotated: false,
            ragged: false,
            #[cfg(feature = "cube")]
            room: 0,
        }
    }

    /// Allocates spare slots, so that [`forget`](Self::forget) can remove up to `columns` tokens of every sequence.
    /// Several calls of `forget` together cannot go back further than `columns` tokens from the largest length that the
    /// cache has had.
    ///
    /// # Panics
    /// Panics if the cache is not empty.
    pub fn forgetting(self, columns: usize) -> Self {
        assert!(
            self.written == 0,
            "the cache is empty, so its ring buffers can still be resized"
        );
        Self {
            spare: columns,
            ..self
        }
    }

    /// The number of spare slots that [`forgetting`](Self::forgetting) set.
    pub(crate) fn spare(&self) -> usize {
        self.spare
    }

    /// Returns the number of last columns (tokens of every sequence) that can be forgotten now.
    pub fn forgettable(&self) -> usize {
        (self.columns + self.spare - self.written).min(self.columns)
    }

    /// Removes the last `count` tokens of every sequence.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if `count` exceeds [`forgettable`](Self::forgettable).
    pub fn forget(&mut self, count: usize) -> Result<(), Gemma4Error> {
        let most = self.forgettable();
        match count > most {
            true => Err(Gemma4Error::Argument {
                argument: "count",
                reason: format!("is {count}, but the cache can forget {most} columns"),
            }),
            false => {
                self.columns -= count;
                Ok(())
            }
        }
    }

    /// The storage format of keys and values.
    pub fn kind(&self) -> CacheKind {
        self.kind
    }

    /// The number of sequences.
    pub fn batch(&self) -> usize {
        self.padding.len()
    }

    /// The number of columns (tokens of every sequence), padding included.
    pub fn len(&self) -> usize {
        self.columns
    }

    /// True if the cache has no columns (tokens of every sequence).
    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// Returns the size of keys and values on the device in bytes.
    pub fn bytes(&self) -> usize {
        self.stores
            .iter()
            .map(|store| match store {
                Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => {
                    buffers.key.bytes() + buffers.value.bytes()
                }
                Store::Compact(_, Some(buffer)) => buffer.slots.bytes(),
                Store::Ring(None) | Store::Growing(None) | Store::Compact(_, None) => 0,
            })
            .sum()
    }

    /// True if at least one sequence begins with padding.
    pub(crate) fn is_padded(&self) -> bool {
        self.most_padding() > 0
    }

    /// Adds `count` to the number of columns (tokens of every sequence). The columns must already be written to the buffers.
    pub(crate) fn advance_by(&mut self, count: usize) {
        self.columns += count;
        self.written = self.written.max(self.columns);
    }

    fn most_padding(&self) -> usize {
        self.padding.iter().copied().max().unwrap_or(0)
    }

    /// Returns the positions of the next `count` tokens of every sequence. Padding tokens have position 0, and so does
    /// the first token after them.
    pub(crate) fn positions(&self, count: usize) -> Positions {
        if self.most_padding() == 0 {
            return Positions::Range {
                first: self.columns,
                count,
            };
        }
        let columns = self.columns..self.columns + count;
        Positions::Each(
            self.padding
                .iter()
                .map(|padding| {
                    columns
                        .clone()
                        .map(|column| column.saturating_sub(*padding))
                        .collect()
                })
                .collect(),
        )
    }

    /// Returns the data that all layers share in a call of the model that adds `count` tokens to every sequence.
    /// `runs_kernels` is true if the device runs CubeCL kernels.
    pub(crate) fn call(&self, count: usize, device: &Device, runs_kernels: bool) -> Call {
        if self.ragged {
            return self.ragged_call(device, runs_kernels);
        }
        let (past, batch) = (self.columns, self.batch());
        let end = past + count;
        let lengths = || Tensor::<1, Int>::full([batch], end as i64, device);
        let causal = count > 1;
        let sliding = match self.reads_ring(count) {
            true => Visible {
                lengths: (end < self.window).then(lengths),
                mask: self.mask(self.ring_columns(end), device),
                ..Visible::default()
            },
            false => Visible {
                causal: true,
                window: Some(self.window),
                mask: self.mask(past - self.kept()..end, device),
                ..Visible::default()
            },
        };
        let full = match past == 0 {
            true => Visible {
                causal,
                mask: self.mask(0..end, device),
                ..Visible::default()
            },
            false => Visible {
                causal,
                lengths: Some(lengths()),
                mask: self.mask(0..self.full_slots(end), device),
                ..Visible::default()
            },
        };
        Call {
            past,
            count,
            sliding,
            full,
            rows: None,
        }
    }

    /// Writes a layer's new keys and values, each `[batch, kv_heads, count, head_dim]`. Returns the keys and values that
    /// the layer's queries attend to. `key_weight` is the key norm's weight.
    ///
    /// # Panics
    /// Panics if the layer is a shared KV layer.
    pub(crate) fn extend(
        &mut self,
        layer: usize,
        key_weight: &Param<Tensor<1>>,
        key: Tensor<4>,
        value: Tensor<4>,
        call: &Call,
    ) -> KeyValues {
        if let Some(rows) = &call.rows {
            return self.extend_ragged(layer, key, value, call, rows);
        }
        let (reads_ring, kept) = (self.reads_ring(call.count), self.kept());
        let (ring, precision) = (self.ring_slots(), self.kind.precision);
        let apart = |key, value| (Slots::new(key, precision), Slots::new(value, precision));
        match &mut self.stores[layer] {
            Store::Ring(store) => {
                let (key, value) = apart(key, value);
                let visible = call.sliding.clone();
                let buffers = store.take();
                let buffers = buffers.unwrap_or_else(|| Buffers::empty(&key, &value, ring));
                if reads_ring {
                    let buffers = buffers.map(key, value, |buffer, new| {
                        write(buffer, new, 0, call.past % ring, 1)
                    });
                    let read = buffers.read(visible);
                    *store = Some(buffers);
                    return read;
                }
                // Concatenate the ring buffer with the new keys and values, because all queries' windows together can
                // contain more tokens than the ring buffer holds.
                let read = KeyValues::new(
                    in_order(&buffers.key, &key, call.past, kept),
                    in_order(&buffers.value, &value, call.past, kept),
                    visible,
                );
                *store =
                    Some(buffers.map(key, value, |buffer, new| write_ring(buffer, new, call.past)));
                read
            }
            Store::Growing(store) => {
                let (key, value) = apart(key, value);
                let new = call
                    .reads_itself(|| KeyValues::new(key.clone(), value.clone(), call.full.clone()));
                let buffers = Buffers::extended(store.take(), key, value, call.past);
                let read = new.unwrap_or_else(|| buffers.read(call.full.clone()));
                *store = Some(buffers);
                read
            }
            Store::Compact(layout, store) => {
                let (old, keys) = match store.take().map(|buffer| *buffer) {
                    Some(CompactBuffer { slots, keys }) => (Some(slots), keys),
                    None => (None, CompactKeys::new(*layout, &key_weight.val())),
                };
                let slots = Slots::new(keys.slots(key.clone(), value.clone()), precision);
                let new = call.reads_itself(|| match precision {
                    KvPrecision::Model => {
                        let (key, value) = apart(key, value);
                        KeyValues::new(key, value, call.full.clone())
                    }
                    KvPrecision::Q8 => KeyValues::of_slots(&slots, &keys, call.full.clone()),
                });
                let slots = extended(old, slots, call.past);
                let read =
                    new.unwrap_or_else(|| KeyValues::of_slots(&slots, &keys, call.full.clone()));
                *store = Some(Box::new(CompactBuffer { slots, keys }));
                read
            }
        }
    }

    /// Returns the keys and values of the last layer of type `kind` that is not a shared KV layer. Also returns the rules
    /// that decide which keys the next query sees. Returns `None` if there is no such layer, or if the cache is empty.
    pub(crate) fn last_of(&self, kind: LayerType, device: &Device) -> Option<KeyValues> {
        let columns = self.columns;
        let lengths = Tensor::<1, Int>::full([self.batch()], columns as i64, device);
        let visible = Visible {
            lengths: Some(lengths),
            mask: self.mask(0..self.full_slots(columns), device),
            ..Visible::default()
        };
        let stores = self.stores.iter().rev();
        let mut found = stores.filter_map(|store| match (kind, store) {
            (LayerType::Sliding, Store::Ring(Some(buffers))) => {
                // Read one token less than the window, because the window also counts the query's own position. Read at
                // least one token, because `parts_in_order` requires one.
                let kept = self.kept().max(1);
                let in_order = |ring: &Slots| Slots::cat(parts_in_order(ring, columns, kept));
                let visible = Visible {
                    mask: self.mask(columns - kept..columns, device),
                    ..Visible::default()
                };
                Some(KeyValues::new(
                    in_order(&buffers.key),
                    in_order(&buffers.value),
                    visible,
                ))
            }
            (LayerType::Full, Store::Growing(Some(buffers))) => Some(buffers.read(visible.clone())),
            (LayerType::Full, Store::Compact(_, Some(buffer))) => {
                let CompactBuffer { slots, keys } = &**buffer;
                Some(KeyValues::of_slots(slots, keys, visible.clone()))
            }
            _ => None,
        });
        found.next()
    }

    /// Adds the call's tokens to the length of the cache, after all layers have written their buffers.
    pub(crate) fn advance(&mut self, call: &Call) {
        self.advance_by(call.count);
    }

    /// Returns the number of slots that a full-attention layer's buffer needs for `end` tokens of every sequence. The buffer
    /// never shrinks.
    fn full_slots(&self, end: usize) -> usize {
        let slots = capacity(end.max(self.written));
        #[cfg(feature = "cube")]
        let slots = slots.max(self.room);
        slots
    }

    /// True if the call has one query per sequence and the ring buffer has no spare slots. The query then sees all
    /// written slots of the ring buffer.
    fn reads_ring(&self, count: usize) -> bool {
        count == 1 && self.spare == 0
    }

    /// Returns the number of slots in a sliding layer's ring buffer.
    fn ring_slots(&self) -> usize {
        self.window + self.spare
    }

    /// Returns the ring buffer's size and the window. From these two numbers the decode kernels compute which slots a
    /// query sees.
    #[cfg(feature = "cube")]
    pub(crate) fn ring(&self) -> Ring {
        Ring::new(self.ring_slots(), self.window)
    }

    /// Returns the number of earlier tokens that the next query of a sliding layer sees.
    fn kept(&self) -> usize {
        self.columns.min(self.window - 1)
    }

    /// Returns one token index for each slot of a ring buffer of `window` slots. The first `end` tokens must have been
    /// written to the buffer. The index belongs to the newest token in the slot. If the slot was never written, the
    /// index belongs to the first token that will be written to the slot.
    fn ring_columns(&self, end: usize) -> impl ExactSizeIterator<Item = usize> + Clone {
        let window = self.window;
        (0..window).map(move |slot| match slot < end {
            true => slot + (end - 1 - slot) / window * window,
            false => slot,
        })
    }

    /// Returns the padding mask for the tokens with the indices `columns`, `[batch, 1, 1, columns]`. An element is `false`
    /// if the token is padding. Returns `None` if no token is padding.
    fn mask(
        &self,
        columns: impl ExactSizeIterator<Item = usize> + Clone,
        device: &Device,
    ) -> Option<Tensor<4, Bool>> {
        // Return early for batches without padding, because a decode step must not iterate over all tokens of the
        // cache.
        let most = self.most_padding();
        let padded = most > 0 && columns.clone().any(|column| column < most);
        padded.then(|| {
            let shape = [self.batch(), 1, 1, columns.len()];
            let visible: Vec<bool> = self
                .padding
                .iter()
                .flat_map(|padding| columns.clone().map(move |column| column >= *padding))
                .collect();
            Tensor::from_data(TensorData::new(visible, shape), device)
        })
    }
}

impl Call {
    /// If the cache was empty before the call, returns the keys and values of the call's tokens, which `own` computes.
    /// Otherwise returns `None`, because the queries must also attend to earlier tokens.
    ///
    /// In an int8 cache, `own` returns quantized keys and values. Later calls also attend to quantized keys and values,
    /// so the result does not depend on how a text is divided into calls.
    fn reads_itself(&self, own: impl FnOnce() -> KeyValues) -> Option<KeyValues> {
        (self.past == 0).then(own)
    }
}
