//! Copies a KV cache of one sequence, so that another prompt can reuse the keys and values of the first tokens.

use super::{
    Cache, Store,
    buffers::{Buffers, capacity, copy_slots},
    checkpoint::Checkpoint,
    compact::CompactBuffer,
    slots::Slots,
};

impl Cache {
    /// Copies the first `column` tokens of the only sequence to a new cache. The new cache shares no memory with this
    /// cache, and has slots for `end` tokens. If [`can_fork`](Self::can_fork) is false at `column`, `checkpoint` must
    /// be a checkpoint at `column`.
    ///
    /// # Panics
    /// Panics if the cache has several sequences or padding. Also panics if neither the cache nor the checkpoint holds
    /// the keys that a query at `column` sees.
    pub(crate) fn fork(&self, column: usize, checkpoint: Option<&Checkpoint>, end: usize) -> Self {
        assert!(
            self.batch() == 1 && !self.is_padded() && !self.ragged,
            "only a cache of one sequence can be copied"
        );
        let slots = capacity(end.max(column + 1));
        let restores = !self.can_fork(column);
        let grown = |buffer: &Slots| copy_slots(buffer, column, slots);
        let stores = self.stores.iter().map(|store| match store {
            // Leave the ring buffer out of the copy, because `restore` allocates a ring buffer and fills it from the
            // checkpoint.
            Store::Ring(Some(_)) if restores => Store::Ring(None),
            Store::Ring(ring) => {
                let whole = |ring: &Slots| copy_slots(ring, ring.dims()[2], ring.dims()[2]);
                Store::Ring(ring.as_ref().map(|ring| Buffers {
                    key: whole(&ring.key),
                    value: whole(&ring.value),
                }))
            }
            Store::Growing(buffers) => Store::Growing(buffers.as_ref().map(|buffers| Buffers {
                key: grown(&buffers.key),
                value: grown(&buffers.value),
            })),
            Store::Compact(layout, buffer) => {
                let copy = buffer.as_ref().map(|buffer| {
                    Box::new(CompactBuffer {
                        slots: grown(&buffer.slots),
                        keys: buffer.keys.clone(),
                    })
                });
                Store::Compact(*layout, copy)
            }
        });
        let mut fork = Self {
            stores: stores.collect(),
            padding: self.padding.clone(),
            rotated: false,
            columns: column,
            // The ring buffers also hold tokens from position `column` on, which may have overwritten the first tokens.
            // To make `is_whole` false for the copy, `written` counts these newer tokens, except the last one. The
            // exception is needed because `can_fork` allows `spare + 1` newer tokens, but `written` may exceed the
            // number of columns by at most `spare`.
            written: match self.is_whole() {
                true => column,
                false => column.max(self.written - 1),
            },
            #[cfg(feature = "cube")]
            room: slots,
            ..*self
        };
        if restores {
            let at_column = checkpoint.filter(|checkpoint| checkpoint.column == column);
            fork.restore(at_column.expect("the checkpoint holds the state at `column`"));
        }
        fork
    }

    /// True if at least one slot of each ring buffer is still empty after `columns` tokens. The ring buffers then hold
    /// all these tokens.
    pub(crate) fn keeps_all(&self, columns: usize) -> bool {
        columns < self.ring_slots()
    }

    /// True if [`fork`](Self::fork) at `column` needs no checkpoint. The ring buffers then hold the `window - 1` keys before
    /// `column`.
    ///
    /// A ring buffer has `window + spare` slots. The buffer therefore still holds these keys if at most `spare + 1`
    /// tokens were written at `column` or later.
    pub(crate) fn can_fork(&self, column: usize) -> bool {
        self.is_whole() || column + self.spare + 1 >= self.written
    }
}
