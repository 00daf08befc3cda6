//! Slots of keys and values, and how columns get into them and out again.

use super::key_values::{KeyValues, Visible};
use burn::tensor::Tensor;

/// Columns that a full layer's buffer grows by. Growing copies the buffer, which attention reads once a column
/// anyway, so this bounds the copies to 1/256 of what is read.
pub(super) const BLOCK: usize = 256;

/// `[batch, kv_heads, slots, head_dim]` each.
#[derive(Clone, Debug)]
pub(crate) struct Buffers {
    pub key: Tensor<4>,
    pub value: Tensor<4>,
}

impl Buffers {
    pub fn map(
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

    pub fn read(&self, visible: Visible) -> KeyValues {
        KeyValues::new(self.key.clone(), self.value.clone(), visible)
    }
}

/// Slots of a buffer that holds `columns`.
pub(super) fn capacity(columns: usize) -> usize {
    columns.next_multiple_of(BLOCK)
}

/// A buffer for tensors like `like` with `slots` slots. What is in them before they are written is never read.
pub(super) fn empty(like: &Tensor<4>, slots: usize) -> Tensor<4> {
    let [batch, heads, _, columns] = like.dims();
    // A slot a row, CUDA's allocator would fill slots of 1,280 bytes up to 1,536.
    let flat = Tensor::<3>::empty(
        [batch, heads, slots * columns],
        (&like.device(), like.dtype()),
    );
    flat.reshape([batch, heads, slots, columns])
}

/// The buffer, or a larger one with its first `columns`, where it has fewer slots than these.
pub(super) fn grown(buffer: Tensor<4>, slots: usize, columns: usize) -> Tensor<4> {
    match buffer.dims()[2] < slots {
        true => write(empty(&buffer, slots), buffer, 0, 0, columns),
        false => buffer,
    }
}

/// A full layer's buffer with a call's columns, `[batch, kv_heads, count, …]`, after `past` others.
pub(super) fn extended(buffer: Option<Tensor<4>>, new: Tensor<4>, past: usize) -> Tensor<4> {
    let count = new.dims()[2];
    let slots = capacity(past + count);
    let buffer = match buffer {
        Some(buffer) => grown(buffer, slots, past),
        None => empty(&new, slots),
    };
    write(buffer, new, 0, past, count)
}

/// Writes `count` columns of `new`, from its `start` on, into the slots from `slot` on.
///
/// The buffer is the only handle to its memory, so this writes in place.
pub(super) fn write(
    buffer: Tensor<4>,
    new: Tensor<4>,
    start: usize,
    slot: usize,
    count: usize,
) -> Tensor<4> {
    let [batch, heads, _, head_dim] = buffer.dims();
    buffer.slice_assign(
        [0..batch, 0..heads, slot..slot + count, 0..head_dim],
        new.narrow(2, start, count),
    )
}

/// Writes into a ring the last columns of `new`, whose first column comes after `past` others.
pub(super) fn write_ring(ring: Tensor<4>, new: Tensor<4>, past: usize) -> Tensor<4> {
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
pub(super) fn in_order(ring: &Tensor<4>, new: &Tensor<4>, past: usize, kept: usize) -> Tensor<4> {
    if kept == 0 {
        return new.clone();
    }
    let mut parts = parts_in_order(ring, past, kept);
    parts.push(new.clone());
    Tensor::cat(parts, 2)
}

/// The last `kept` of `past` columns of a ring, of which there is one at least, in order.
pub(super) fn parts_in_order(ring: &Tensor<4>, past: usize, kept: usize) -> Vec<Tensor<4>> {
    let slots = ring.dims()[2];
    let slot = (past - kept) % slots;
    let first = kept.min(slots - slot);
    let mut parts = vec![ring.clone().narrow(2, slot, first)];
    if kept > first {
        parts.push(ring.clone().narrow(2, 0, kept - first));
    }
    parts
}
