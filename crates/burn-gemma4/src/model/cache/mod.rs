//! Keys and values of the positions that a model has read.
//!
//! Sliding layers keep a ring of one window, full layers a buffer that grows by blocks, layers that read an
//! earlier layer's keys and values keep nothing. Sequences of a batch are aligned at their ends: a shorter one
//! begins with padding, which nothing sees, so that every sequence writes the same column.

pub(crate) mod compact;
pub(crate) mod key_values;

use crate::{Gemma4Config, LayerType, op::rope::Positions};
use burn::{
    module::Param,
    tensor::{Bool, Device, Int, Tensor, TensorData},
};
use compact::{CompactKeys, CompactLayout};
use key_values::{KeyValues, Visible};

/// Columns that a full layer's buffer grows by. Growing copies the buffer, which attention reads once a column
/// anyway, so this bounds the copies to 1/256 of what is read.
const BLOCK: usize = 256;

/// Keys and values of a batch of sequences.
#[derive(Debug)]
pub struct Cache {
    /// Of every layer that has its own keys and values.
    stores: Vec<Store>,
    window: usize,
    /// Columns written, padding included.
    columns: usize,
    /// Leading columns of each sequence that are padding.
    padding: Vec<usize>,
    compact_keys: bool,
    /// See [`Self::room`].
    #[cfg(feature = "cube")]
    room: usize,
}

/// Where one layer's keys and values are, from the first call on.
#[derive(Debug)]
enum Store {
    /// Column `c` is in slot `c % window`.
    Ring(Option<Buffers>),
    /// Column `c` is in slot `c`.
    Growing(Option<Buffers>),
    /// Column `c` is in slot `c`, which holds both key and value.
    Compact(CompactLayout, Option<Box<CompactBuffer>>),
}

/// `[batch, kv_heads, slots, head_dim]` each.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    pub key: Tensor<4>,
    pub value: Tensor<4>,
}

/// Keys and values that share slots.
#[derive(Clone, Debug)]
pub(crate) struct CompactBuffer {
    /// `[batch, kv_heads, slots, width]`.
    pub slots: Tensor<4>,
    /// How they are laid out and read.
    pub keys: CompactKeys,
}

/// Where a layer's next key and value are written.
#[cfg(feature = "cube")]
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// Each in a buffer of its own.
    Apart(Box<Buffers>),
    /// Both in the same slots.
    Compact(Box<CompactBuffer>),
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
    pub(crate) fn new(config: &Gemma4Config, padding: Vec<usize>, compact_keys: bool) -> Self {
        let stores = (0..config.first_shared_layer())
            .map(|layer| {
                let layout = CompactLayout::of(config, layer).filter(|_| compact_keys);
                match (config.layer_types[layer], layout) {
                    (LayerType::Sliding, _) => Store::Ring(None),
                    (LayerType::Full, Some(layout)) => Store::Compact(layout, None),
                    (LayerType::Full, None) => Store::Growing(None),
                }
            })
            .collect();
        Self {
            stores,
            window: config.sliding_window,
            columns: 0,
            padding,
            compact_keys,
            #[cfg(feature = "cube")]
            room: 0,
        }
    }

    /// Whether it was asked to keep keys compact: see [`Gemma4Model::compact_cache`](crate::Gemma4Model::compact_cache).
    pub fn has_compact_keys(&self) -> bool {
        self.compact_keys
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
        let bytes = |tensor: &Tensor<4>| tensor.shape().num_elements() * tensor.dtype().size();
        self.stores
            .iter()
            .map(|store| match store {
                Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => {
                    bytes(&buffers.key) + bytes(&buffers.value)
                }
                Store::Compact(_, Some(buffer)) => bytes(&buffer.slots),
                Store::Ring(None) | Store::Growing(None) | Store::Compact(_, None) => 0,
            })
            .sum()
    }

    /// Whether some sequence begins with padding.
    #[cfg(feature = "cube")]
    pub(crate) fn is_padded(&self) -> bool {
        self.most_padding() > 0
    }

    /// Columns up to which every buffer has slots.
    #[cfg(feature = "cube")]
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    /// Gets room for at least one more column. Whoever writes columns one by one notices that buffers move, so they grow by
    /// an eighth, and not by fewer than 1,024 columns.
    #[cfg(feature = "cube")]
    pub(crate) fn make_room(&mut self) {
        let columns = self.columns;
        let room = capacity(columns + (columns / 8).max(4 * BLOCK));
        let grow = |buffer: &mut Tensor<4>| *buffer = grown(buffer.clone(), room, columns);
        for store in &mut self.stores {
            match store {
                Store::Growing(Some(buffers)) => {
                    grow(&mut buffers.key);
                    grow(&mut buffers.value);
                }
                Store::Compact(_, Some(buffer)) => grow(&mut buffer.slots),
                Store::Ring(_) | Store::Growing(None) | Store::Compact(_, None) => {}
            }
        }
        self.room = room;
    }

    /// Where every layer that has keys and values of its own writes the next ones.
    ///
    /// # Panics
    /// If the cache is empty.
    #[cfg(feature = "cube")]
    pub(crate) fn targets(&self) -> Vec<Target> {
        self.stores
            .iter()
            .map(|store| match store {
                Store::Ring(Some(buffers)) | Store::Growing(Some(buffers)) => {
                    Target::Apart(Box::new(buffers.clone()))
                }
                Store::Compact(_, Some(buffer)) => Target::Compact(buffer.clone()),
                Store::Ring(None) | Store::Growing(None) | Store::Compact(_, None) => {
                    panic!("an empty cache has no buffers")
                }
            })
            .collect()
    }

    /// Counts a column that was written into the buffers.
    #[cfg(feature = "cube")]
    pub(crate) fn advance_one(&mut self) {
        self.columns += 1;
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
                lengths: None,
                mask: self.mask(past - self.kept()..end, device),
                segments: None,
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
                mask: self.mask(0..capacity(end), device),
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
        let (reads_ring, kept, window) = (self.reads_ring(call.count), self.kept(), self.window);
        match &mut self.stores[layer] {
            Store::Ring(store) => {
                let visible = call.sliding.clone();
                let slots = |tensor: &Tensor<4>| empty(tensor, window);
                let buffers = store.take().unwrap_or_else(|| Buffers {
                    key: slots(&key),
                    value: slots(&value),
                });
                if reads_ring {
                    let buffers = buffers.map(key, value, |buffer, new| {
                        write(buffer, new, 0, call.past % window, 1)
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
                let new = call.reads_itself(&key, &value);
                let (old_key, old_value) = match store.take() {
                    Some(Buffers { key, value }) => (Some(key), Some(value)),
                    None => (None, None),
                };
                let buffers = Buffers {
                    key: extended(old_key, key, call),
                    value: extended(old_value, value, call),
                };
                let read = new.unwrap_or_else(|| buffers.read(call.full.clone()));
                *store = Some(buffers);
                read
            }
            Store::Compact(layout, store) => {
                let new = call.reads_itself(&key, &value);
                let (old, keys) = match store.take().map(|buffer| *buffer) {
                    Some(CompactBuffer { slots, keys }) => (Some(slots), keys),
                    None => (None, CompactKeys::new(*layout, &key_weight.val())),
                };
                let slots = extended(old, keys.slots(key, value), call);
                let read =
                    new.unwrap_or_else(|| KeyValues::of_slots(&slots, &keys, call.full.clone()));
                *store = Some(Box::new(CompactBuffer { slots, keys }));
                read
            }
        }
    }

    /// Counts the columns of a call whose every layer has been extended.
    pub(crate) fn advance(&mut self, call: &Call) {
        self.columns += call.count;
    }

    /// Whether a call's queries read the ring where it lies: a single query sees all of it, in any order.
    fn reads_ring(&self, count: usize) -> bool {
        count == 1
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

impl Buffers {
    fn map(
        self,
        key: Tensor<4>,
        value: Tensor<4>,
        write: impl Fn(Tensor<4>, Tensor<4>) -> Tensor<4>,
    ) -> Self {
        Self {
            key: write(self.key, key),
            value: write(self.value, value),
        }
    }

    fn read(&self, visible: Visible) -> KeyValues {
        KeyValues::new(self.key.clone(), self.value.clone(), visible)
    }
}

impl Call {
    /// What full layers' queries read in a first call: its own keys and values, as they were made.
    fn reads_itself(&self, key: &Tensor<4>, value: &Tensor<4>) -> Option<KeyValues> {
        let first = self.past == 0;
        first.then(|| KeyValues::new(key.clone(), value.clone(), self.full.clone()))
    }
}

/// Slots of a buffer that holds `columns`.
fn capacity(columns: usize) -> usize {
    columns.next_multiple_of(BLOCK)
}

/// A buffer for tensors like `like` with `slots` slots. What is in them before they are written is never read.
fn empty(like: &Tensor<4>, slots: usize) -> Tensor<4> {
    let [batch, heads, _, columns] = like.dims();
    // A slot a row, CUDA's allocator would fill slots of 1,280 bytes up to 1,536.
    let flat = Tensor::<3>::empty(
        [batch, heads, slots * columns],
        (&like.device(), like.dtype()),
    );
    flat.reshape([batch, heads, slots, columns])
}

/// The buffer, or a larger one with its first `columns`, where it has fewer slots than these.
fn grown(buffer: Tensor<4>, slots: usize, columns: usize) -> Tensor<4> {
    match buffer.dims()[2] < slots {
        true => write(empty(&buffer, slots), buffer, 0, 0, columns),
        false => buffer,
    }
}

/// A full layer's buffer with the call's columns, `[batch, kv_heads, count, …]`, after those of the past.
fn extended(buffer: Option<Tensor<4>>, new: Tensor<4>, call: &Call) -> Tensor<4> {
    let slots = capacity(call.past + call.count);
    let buffer = match buffer {
        Some(buffer) => grown(buffer, slots, call.past),
        None => empty(&new, slots),
    };
    write(buffer, new, 0, call.past, call.count)
}

/// Writes `count` columns of `new`, from its `start` on, into the slots from `slot` on.
///
/// The buffer is the only handle to its memory, so this writes in place.
fn write(buffer: Tensor<4>, new: Tensor<4>, start: usize, slot: usize, count: usize) -> Tensor<4> {
    let [batch, heads, _, head_dim] = buffer.dims();
    buffer.slice_assign(
        [0..batch, 0..heads, slot..slot + count, 0..head_dim],
        new.narrow(2, start, count),
    )
}

/// Writes into a ring the last columns of `new`, whose first column comes after `past` others.
fn write_ring(ring: Tensor<4>, new: Tensor<4>, past: usize) -> Tensor<4> {
    let (window, count) = (ring.dims()[2], new.dims()[2]);
    let kept = count.min(window);
    let start = count - kept;
    let slot = (past + start) % window;
    let first = kept.min(window - slot);
    let ring = write(ring, new.clone(), start, slot, first);
    match kept - first {
        0 => ring,
        rest => write(ring, new, start + first, 0, rest),
    }
}

/// The last `kept` of `past` columns of a ring, in order, and then `new`.
fn in_order(ring: &Tensor<4>, new: &Tensor<4>, past: usize, kept: usize) -> Tensor<4> {
    if kept == 0 {
        return new.clone();
    }
    let window = ring.dims()[2];
    let slot = (past - kept) % window;
    let first = kept.min(window - slot);
    let mut parts = vec![ring.clone().narrow(2, slot, first)];
    if kept > first {
        parts.push(ring.clone().narrow(2, 0, kept - first));
    }
    parts.push(new.clone());
    Tensor::cat(parts, 2)
}
