//! A cache as it was at an earlier column. Full layers still have all columns; a ring forgets, so that its last ones are copied.

use super::{
    Cache, Store,
    buffers::{Buffers, parts_in_order, write, write_ring},
    slots::Slots,
};

/// What rings held at a column.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// Columns that had been written.
    pub column: usize,
    /// The last of them that each ring still had.
    pub kept: usize,
    /// By layer: `[batch, kv_heads, kept, head_dim]`, in order; nothing for layers without a ring, and where nothing was kept.
    pub rings: Vec<Option<Buffers>>,
}

impl Checkpoint {
    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        let rings = self.rings.iter().flatten();
        rings
            .map(|ring| ring.key.bytes() + ring.value.bytes())
            .sum()
    }
}

impl Cache {
    /// What the rings hold now.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        let kept = self.kept_at_most();
        let columns = self.columns;
        let copy = |ring: &Slots| copied(ring, columns, kept);
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

    /// The last columns that a ring still has and may need: what the next query sees, and what may be forgotten before it.
    pub(crate) fn kept_at_most(&self) -> usize {
        self.columns.min(self.window - 1 + self.forgettable())
    }

    /// Forgets all columns after an earlier one, if rings have not overwritten what the next query sees. Whether it did.
    ///
    /// # Panics
    /// With padding, whose mask counts all columns that were ever written.
    pub(crate) fn rewind(&mut self, column: usize) -> bool {
        assert!(!self.is_padded(), "of one text");
        // A full ring counts as one that has overwritten: of a checkpoint, its first column may be missing.
        let is_whole = self.written < self.ring_slots();
        match is_whole || column + self.forgettable() >= self.columns {
            true if is_whole => {
                (self.columns, self.written) = (column, column);
                true
            }
            true => {
                self.columns = column;
                true
            }
            false => false,
        }
    }

    /// Goes back to a checkpoint of this cache: to no later column than it has.
    ///
    /// # Panics
    /// As [`rewind`](Self::rewind).
    pub(crate) fn restore(&mut self, checkpoint: &Checkpoint) {
        assert!(!self.is_padded(), "of one text");
        let slots = self.ring_slots();
        let past = checkpoint.column - checkpoint.kept;
        let written = |ring, columns: &Slots| write_ring(ring, columns.clone(), past);
        for (store, kept) in self.stores.iter_mut().zip(&checkpoint.rings) {
            if let (Store::Ring(ring), Some(kept)) = (store, kept) {
                let old = ring.take().unwrap_or_else(|| Buffers {
                    key: kept.key.empty(slots),
                    value: kept.value.empty(slots),
                });
                *ring = Some(Buffers {
                    key: written(old.key, &kept.key),
                    value: written(old.value, &kept.value),
                });
            }
        }
        self.columns = checkpoint.column;
        // Of the spare columns, those may be forgotten before which the window is still there.
        let spare = match checkpoint.kept == checkpoint.column {
            true => self.spare,
            false => self.spare.min(checkpoint.kept + 1 - self.window),
        };
        self.written = self.columns + self.spare - spare;
    }
}

/// The last `kept` of `past` columns of a ring, of which there is one at least, in memory of their own: kernels write rings where they lie.
fn copied(ring: &Slots, past: usize, kept: usize) -> Slots {
    let mut slot = 0;
    // One slot more than there are columns: what is written to all of a tensor may be the tensor from then on.
    let copy =
        parts_in_order(ring, past, kept)
            .into_iter()
            .fold(ring.empty(kept + 1), |copy, part| {
                let count = part.dims()[2];
                let copy = write(copy, part, 0, slot, count);
                slot += count;
                copy
            });
    copy.narrow(2, 0, kept)
}
