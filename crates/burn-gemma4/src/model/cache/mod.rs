//! Keys and values of the positions that a model has read.
//!
//! Sliding layers keep a ring of one window, full layers a buffer that grows by blocks, layers that read an
//! earlier layer's keys and values keep nothing. Sequences of a batch are aligned at their ends: a shorter one
//! begins with padding, which nothing sees, so that every sequence writes the same column. While kernels decode, it begins with its text
//! instead, and every sequence writes at its own position.
//!
//! A cache that may forget its last columns has rings of as many slots more: a column that is forgotten has then overwritten
//! nothing that the columns after it see.

mod buffers;

pub(crate) mod checkpoint;
pub(crate) mod columns;
pub(crate) mod compact;
pub(crate) mod key_values;
pub(crate) mod kind;
#[cfg(feature = "cube")]
pub(crate) mod ring;
#[cfg(feature = "cube")]
mod room;
pub(crate) mod slots;
mod turned;

use crate::{Gemma4Config, Gemma4Error, LayerType, op::rope::Positions};
use buffers::{Buffers, capacity, extended, in_order, parts_in_order, write, write_ring};
use burn::{
    module::Param,
    tensor::{Bool, Device, Int, Tensor, TensorData},
};
use compact::{CompactBuffer, CompactKeys, CompactLayout};
use key_values::{KeyValues, Visible};
use kind::{CacheKind, KvPrecision};
#[cfg(feature = "cube")]
use ring::Ring;
#[cfg(feature = "cube")]
pub(crate) use room::Target;
use slots::Slots;

/// Keys and values of a batch of sequences.
#[derive(Debug)]
pub struct Cache {
    /// Of every layer that has its own keys and values.
    stores: Vec<Store>,
    window: usize,
    /// Positions that the model has.
    #[cfg(feature = "cube")]
    positions: usize,
    /// Columns that may be forgotten at once, for each of which a ring has a slot beside the window's.
    spare: usize,
    /// Columns written, padding included, but for those that are forgotten.
    columns: usize,
    /// One more than the last column that was ever written.
    written: usize,
    /// Leading columns of each sequence that are padding.
    padding: Vec<usize>,
    kind: CacheKind,
    /// Whether each sequence's first token, rather than its padding, is in slot 0: see `turned`.
    turned: bool,
    /// See [`Self::room`].
    #[cfg(feature = "cube")]
    room: usize,
}

/// Where one layer's keys and values are, from the first call on.
#[derive(Debug)]
enum Store {
    /// Column `c` is in slot `c % slots`, of which there are the window's and the spare ones.
    Ring(Option<Buffers>),
    /// Column `c` is in slot `c`.
    Growing(Option<Buffers>),
    /// Column `c` is in slot `c`, which holds both key and value.
    Compact(CompactLayout, Option<Box<CompactBuffer>>),
}

/// What all layers share in one call.
#[derive(Debug)]
pub(crate) struct Call {
    /// Columns before the call.
    past: usize,
    /// Columns of the call.
    count: usize,
    sliding: Visible,
    full: Visible,
}

impl Cache {
    /// An empty cache for `padding.len()` sequences, each of which begins with that many columns of padding.
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
            // A window beyond the last position shows no more keys, and a ring has a slot for each of its keys.
            window: config.sliding_window.min(config.max_position_embeddings),
            #[cfg(feature = "cube")]
            positions: config.max_position_embeddings,
            spare: 0,
            columns: 0,
            written: 0,
            padding,
            kind,
            turned: false,
            #[cfg(feature = "cube")]
            room: 0,
        }
    }

    /// The same cache, still empty, whose last columns may be [forgotten](Self::forget), up to `columns` before the last one that
    /// it ever had. Rings get as many slots more.
    ///
    /// # Panics
    /// If something was written: its rings have their sizes.
    pub fn forgetting(self, columns: usize) -> Self {
        assert!(self.written == 0, "rings keep their sizes");
        Self {
            spare: columns,
            ..self
        }
    }

    /// How many columns [`forgetting`](Self::forgetting) asked for.
    pub(crate) fn spare(&self) -> usize {
        self.spare
    }

    /// How many of its last columns may be forgotten now.
    pub fn forgettable(&self) -> usize {
        (self.columns + self.spare - self.written).min(self.columns)
    }

    /// Forgets the last `count` columns, as if they had not been read.
    ///
    /// # Errors
    /// [`Gemma4Error::Argument`] where that is more than [`forgettable`](Self::forgettable).
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

    /// How it keeps keys and values.
    pub fn kind(&self) -> CacheKind {
        self.kind
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.padding.len()
    }

    /// Columns written, padding included.
    pub fn len(&self) -> usize {
        self.columns
    }

    /// Whether nothing is written.
    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// Bytes that keys and values take on the device.
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

    /// Whether some sequence begins with padding.
    pub(crate) fn is_padded(&self) -> bool {
        self.most_padding() > 0
    }

    /// Counts columns that were written into the buffers.
    pub(crate) fn advance_by(&mut self, count: usize) {
        self.columns += count;
        self.written = self.written.max(self.columns);
    }

    fn most_padding(&self) -> usize {
        self.padding.iter().copied().max().unwrap_or(0)
    }

    /// The positions of the next `count` columns. Padding is at position 0, like the first token.
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

    /// What a call with `count` more columns sees.
    pub(crate) fn call(&self, count: usize, device: &Device) -> Call {
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
        }
    }

    /// Takes a layer's new keys and values, `[batch, kv_heads, count, head_dim]`, and gives what its queries read.
    /// `key_weight` is that of the norm of keys.
    ///
    /// # Panics
    /// For a layer that reads an earlier layer's keys and values.
    pub(crate) fn extend(
        &mut self,
        layer: usize,
        key_weight: &Param<Tensor<1>>,
        key: Tensor<4>,
        value: Tensor<4>,
        call: &Call,
    ) -> KeyValues {
        let (reads_ring, kept) = (self.reads_ring(call.count), self.kept());
        let (ring, precision) = (self.ring_slots(), self.kind.precision);
        let apart = |key, value| (Slots::new(key, precision), Slots::new(value, precision));
        match &mut self.stores[layer] {
            Store::Ring(store) => {
                let (key, value) = apart(key, value);
                let visible = call.sliding.clone();
                let buffers = store.take().unwrap_or_else(|| Buffers {
                    key: key.empty(ring),
                    value: value.empty(ring),
                });
                if reads_ring {
                    let buffers = buffers.map(key, value, |buffer, new| {
                        write(buffer, new, 0, call.past % ring, 1)
                    });
                    let read = buffers.read(visible);
                    *store = Some(buffers);
                    return read;
                }
                // The ring holds fewer columns than the queries see together: they read what it has kept and
                // the new ones side by side.
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
                let (old_key, old_value) = match store.take() {
                    Some(Buffers { key, value }) => (Some(key), Some(value)),
                    None => (None, None),
                };
                let buffers = Buffers {
                    key: extended(old_key, key, call.past),
                    value: extended(old_value, value, call.past),
                };
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

    /// The keys and values of the last layer of `kind` that has its own, and what a query at the next position sees of them. Nothing where
    /// there is no such layer, or nothing was read.
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
                // The next position's own key takes one of the window's places, of which there is one at least.
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

    /// Counts the columns of a call whose every layer has been extended.
    pub(crate) fn advance(&mut self, call: &Call) {
        self.advance_by(call.count);
    }

    /// Slots of a full layer's buffer with columns up to `end`. It keeps the blocks that columns needed which are forgotten, and the
    /// room that decoding by kernels has made.
    fn full_slots(&self, end: usize) -> usize {
        let slots = capacity(end.max(self.written));
        #[cfg(feature = "cube")]
        let slots = slots.max(self.room);
        slots
    }

    /// Whether a call's queries read the ring where it lies: a single query sees all of it, in any order, unless it has spare
    /// slots.
    fn reads_ring(&self, count: usize) -> bool {
        count == 1 && self.spare == 0
    }

    /// Slots of a sliding layer.
    fn ring_slots(&self) -> usize {
        self.window + self.spare
    }

    /// What queries see in sliding layers.
    #[cfg(feature = "cube")]
    pub(crate) fn ring(&self) -> Ring {
        Ring::new(self.ring_slots(), self.window)
    }

    /// Columns of the past that a sliding layer's next queries may still see.
    fn kept(&self) -> usize {
        self.columns.min(self.window - 1)
    }

    /// The columns in the ring's slots once `end` columns are written, the newest of each slot.
    fn ring_columns(&self, end: usize) -> impl ExactSizeIterator<Item = usize> + Clone {
        let window = self.window;
        (0..window).map(move |slot| match slot < end {
            true => slot + (end - 1 - slot) / window * window,
            false => slot,
        })
    }

    /// `[batch, 1, 1, columns]`, `false` for padding; `None` where there is none.
    fn mask(
        &self,
        columns: impl ExactSizeIterator<Item = usize> + Clone,
        device: &Device,
    ) -> Option<Tensor<4, Bool>> {
        // Most batches have no padding, and then a token must not cost a look at every column.
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
    /// What full layers' queries read in a first call: its own keys and values, and no buffer. What is kept quantized is read so, too: what
    /// comes out does not depend on how a text is divided into calls.
    fn reads_itself(&self, own: impl FnOnce() -> KeyValues) -> Option<KeyValues> {
        (self.past == 0).then(own)
    }
}
