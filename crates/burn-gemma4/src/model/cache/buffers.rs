//! Slots of keys and values, and how columns get into them and out again.

use super::{
    key_values::{KeyValues, Visible},
    slots::Slots,
};

/// Columns that a full layer's buffer grows by. Growing copies the buffer, which attention reads once a column
/// anyway, so this bounds the copies to 1/256 of what is read.
pub(super) const BLOCK: usize = 256;

/// `[batch, kv_heads, slots, head_dim]` each.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    pub key: Slots,
    pub value: Slots,
}

impl Buffers {
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

/// Slots of a buffer that holds `columns`.
pub(super) fn capacity(columns: usize) -> usize {
    columns.next_multiple_of(BLOCK)
}

/// The buffer, or a larger one with its first `columns`, where it has fewer slots than these.
pub(super) fn grown(buffer: Slots, slots: usize, columns: usize) -> Slots {
    match buffer.dims()[2] < slots {
        true => write(buffer.empty(slots), buffer, 0, 0, columns),
        false => buffer,
    }
}

/// A full layer's buffer with a call's columns, `[batch, kv_heads, count, …]`, after `past` others.
pub(super) fn extended(buffer: Option<Slots>, new: Slots, past: usize) -> Slots {
    let count = new.dims()[2];
    let slots = capacity(past + count);
    let buffer = match buffer {
        Some(buffer) => grown(buffer, slots, past),
        None => new.empty(slots),
    };
    write(buffer, new, 0, past, count)
}

/// Writes `count` columns of `new`, from its `start` on, into the slots from `slot` on.
///
/// The buffer is the only handle to its memory, so this writes in place.
pub(super) fn write(buffer: Slots, new: Slots, start: usize, slot: usize, count: usize) -> Slots {
    let [batch, ..] = buffer.dims();
    buffer.assign(0..batch, slot..slot + count, new.narrow(2, start, count))
}

/// Writes into a ring the last columns of `new`, whose first column comes after `past` others.
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

/// The last `kept` of `past` columns of a ring, in order, and then `new`.
pub(super) fn in_order(ring: &Slots, new: &Slots, past: usize, kept: usize) -> Slots {
    if kept == 0 {
        return new.clone();
    }
    let mut parts = parts_in_order(ring, past, kept);
    parts.push(new.clone());
    Slots::cat(parts)
}

/// The last `kept` of `past` columns of a ring, of which there is one at least, in order.
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
