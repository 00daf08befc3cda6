//! Buffers of keys and values, and functions that write and read these buffers.
//!
//! A column is one token of every sequence, numbered in text order. A slot is an index in a buffer. A layer with full
//! attention stores column `c` in slot `c`. A layer with a sliding window has a ring buffer, and stores column `c` in slot
//! `c % slots`.

use super::{
    key_values::{KeyValues, Visible},
    slots::Slots,
};

/// The buffer of a full-attention layer grows by a multiple of this number of slots. Growing copies the whole buffer,
/// but only once per 256 tokens. Attention reads the whole buffer for every token, so the copies cost little.
pub(super) const BLOCK: usize = 256;

/// The keys and values of a layer, each `[batch, kv_heads, slots, head_dim]`.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    pub key: Slots,
    pub value: Slots,
}

impl Buffers {
    /// Allocates buffers of `slots` uninitialized slots, in the storage formats of `key` and `value`.
    pub fn empty(key: &Slots, value: &Slots, slots: usize) -> Self {
        Self {
            key: key.empty(slots),
            value: value.empty(slots),
        }
    }

    /// Appends new keys and values to a full-attention layer's buffers that already hold `past` tokens of every
    /// sequence.
    pub fn extended(old: Option<Self>, key: Slots, value: Slots, past: usize) -> Self {
        let (old_key, old_value) = old.map(|old| (old.key, old.value)).unzip();
        Self {
            key: extended(old_key, key, past),
            value: extended(old_value, value, past),
        }
    }

    pub fn map(self, key: Slots, value: Slots, write: impl Fn(Slots, Slots) -> Slots) -> Self {
        Self {
            key: write(self.key, key),
            value: write(self.value, value),
        }
    }

    pub fn read(&self, visible: Visible) -> KeyValues {
        KeyValues::new(self.key.clone(), self.value.clone(), visible)
    }
}

/// Returns the number of slots in a full-attention layer's buffer for `columns` tokens: a multiple of [`BLOCK`].
pub(super) fn capacity(columns: usize) -> usize {
    columns.next_multiple_of(BLOCK)
}

/// Returns `buffer` if it has at least `slots` slots. Otherwise returns a new buffer of `slots` slots with a copy of the
/// first `columns` slots of `buffer`.
pub(super) fn grown(buffer: Slots, slots: usize, columns: usize) -> Slots {
    match buffer.dims()[2] < slots {
        true => write(buffer.empty(slots), buffer, 0, 0, columns),
        false => buffer,
    }
}

/// Appends `new`, `[batch, kv_heads, count, …]`, to a full-attention layer's buffer that already holds `past` tokens of
/// every sequence.
pub(super) fn extended(buffer: Option<Slots>, new: Slots, past: usize) -> Slots {
    let count = new.dims()[2];
    let slots = capacity(past + count);
    let buffer = match buffer {
        Some(buffer) => grown(buffer, slots, past),
        None => new.empty(slots),
    };
    write(buffer, new, 0, past, count)
}

/// Copies `count` tokens of every sequence from `new`, beginning at index `start`, to `buffer`, beginning at slot `slot`.
///
/// If the caller passes the only handle to the memory of `buffer`, the write happens in place.
pub(super) fn write(buffer: Slots, new: Slots, start: usize, slot: usize, count: usize) -> Slots {
    let [batch, ..] = buffer.dims();
    buffer.assign(0..batch, slot..slot + count, new.narrow(2, start, count))
}

/// Copies the first `count` slots of a buffer of one sequence to a new buffer of `slots` slots.
pub(super) fn copy_slots(buffer: &Slots, count: usize, slots: usize) -> Slots {
    write(buffer.empty(slots), buffer.clone(), 0, 0, count)
}

/// Writes the tokens of `new` to a ring buffer, to which `past` tokens were written before. If `new` has more tokens
/// than the buffer has slots, writes only the last tokens of `new`.
pub(super) fn write_ring(ring: Slots, new: Slots, past: usize) -> Slots {
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

/// Returns the last `kept` of the `past` tokens that were written to a ring buffer, followed by the tokens of `new`.
pub(super) fn in_order(ring: &Slots, new: &Slots, past: usize, kept: usize) -> Slots {
    if kept == 0 {
        return new.clone();
    }
    let mut parts = parts_in_order(ring, past, kept);
    parts.push(new.clone());
    Slots::cat(parts)
}

/// Returns the slots of the last `kept` of the `past` tokens that were written to a ring buffer, in text order. If the tokens
/// wrap around the end of the buffer, the slots form two ranges. `kept` must be at least 1.
pub(super) fn parts_in_order(ring: &Slots, past: usize, kept: usize) -> Vec<Slots> {
    let slots = ring.dims()[2];
    let slot = (past - kept) % slots;
    let first = kept.min(slots - slot);
    let mut parts = vec![ring.narrow(2, slot, first)];
    if kept > first {
        parts.push(ring.narrow(2, 0, kept - first));
    }
    parts
}
