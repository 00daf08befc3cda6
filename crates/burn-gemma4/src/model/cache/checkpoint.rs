//! Checkpoints of the KV cache, from which the cache can be restored to an earlier token. A column is one token of the text.
//!
//! Ring buffers overwrite old columns, so a checkpoint copies the last columns of each ring buffer. Full-attention layers
//! keep all columns, so a checkpoint does not copy them.

use super::{
    Cache, Store,
    buffers::{Buffers, parts_in_order, write, write_ring},
    slots::Slots,
};

/// The contents of the ring buffers at an earlier token of the text.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// The number of columns (tokens) in the cache when the checkpoint was made.
    pub column: usize,
    /// The number of columns (tokens) that the checkpoint copied from each ring buffer.
    pub kept: usize,
    /// The copied keys and values of each layer, `[batch, kv_heads, kept, head_dim]`, in text order. `None` for a layer
    /// without a ring buffer, or if `kept` is 0.
    pub rings: Vec<Option<Buffers>>,
}

impl Checkpoint {
    /// Returns the checkpoint's size on the device in bytes.
    pub fn bytes(&self) -> usize {
        let rings = self.rings.iter().flatten();
        rings
            .map(|ring| ring.key.bytes() + ring.value.bytes())
            .sum()
    }
}

impl Cache {
    /// Creates a checkpoint, which copies the keys and values of the last tokens in each ring buffer.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        let kept = self.kept_at_most();
        let columns = self.columns;
        let copy = |ring: &Slots| copy_ring(ring, columns, kept);
        let rings = self.stores.iter().map(|store| match store {
            Store::Ring(Some(ring)) if kept > 0 => Some(Buffers {
                key: copy(&ring.key),
                value: copy(&ring.value),
            }),
            _ => None,
        });
        Checkpoint {
            column: columns,
            kept,
            rings: rings.collect(),
        }
    }

    /// Returns how many of the latest tokens a checkpoint must copy from each ring buffer. These tokens are the
    /// `window - 1` tokens that the next query sees, and the tokens that [`forget`](Self::forget) may remove before
    /// that query.
    pub(crate) fn kept_at_most(&self) -> usize {
        self.columns.min(self.window - 1 + self.forgettable())
    }

    /// Removes the token at position `column` and all later tokens, and returns true. Changes nothing and returns false if a
    /// query at that position would attend to a key that the ring buffers no longer hold.
    ///
    /// # Panics
    /// Panics if the cache is padded.
    pub(crate) fn rewind(&mut self, column: usize) -> bool {
        assert!(!self.is_padded(), "only an unpadded cache can be rewound");
        // Change the cache only if the ring buffers hold all keys that a query at the position `column` attends to.
        let is_whole = self.is_whole();
        if !is_whole && column + self.forgettable() < self.columns {
            return false;
        }
        self.columns = column;
        if is_whole {
            self.written = column;
        }
        true
    }

    /// True if some slots of the ring buffers were never written. The ring buffers then still hold every token of the
    /// text. A checkpoint may lack the first tokens of the text. [`restore`](Self::restore) then sets `written` to at
    /// least the number of slots, so that the result is false.
    pub(super) fn is_whole(&self) -> bool {
        self.keeps_all(self.written)
    }

    /// Restores this cache to one of its earlier checkpoints, which must not contain more tokens than the cache.
    ///
    /// # Panics
    /// Panics if the cache is padded.
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) {
        assert!(!self.is_padded(), "only an unpadded cache can be restored");
        let slots = self.ring_slots();
        let past = checkpoint.column - checkpoint.kept;
        let written = |ring, columns: &Slots| write_ring(ring, columns.clone(), past);
        for (store, kept) in self.stores.iter_mut().zip(&checkpoint.rings) {
            if let (Store::Ring(ring), Some(kept)) = (store, kept) {
                let old = ring.take();
                let old = old.unwrap_or_else(|| Buffers::empty(&kept.key, &kept.value, slots));
                *ring = Some(Buffers {
                    key: written(old.key, &kept.key),
                    value: written(old.value, &kept.value),
                });
            }
        }
        self.columns = checkpoint.column;
        // Limit the number of tokens that `forget` may remove. After the removal, the ring buffers must still hold all
        // keys that the next query sees.
        let spare = match checkpoint.kept == checkpoint.column {
            true => self.spare,
            false => self.spare.min(checkpoint.kept + 1 - self.window),
        };
        self.written = self.columns + self.spare - spare;
    }
}

/// Copies the last `kept` of the `past` tokens that were written to a ring buffer. The result must not be a view,
/// because a view would change when kernels overwrite the ring buffer in place. `kept` must be at least 1.
fn copy_ring(ring: &Slots, past: usize, kept: usize) -> Slots {
    let mut slot = 0;
    let parts = parts_in_order(ring, past, kept).into_iter();
    parts.fold(ring.empty(kept), |copy, part| {
        let count = part.dims()[2];
        let copy = write(copy, part, 0, slot, count);
        slot += count;
        copy
    })
}
