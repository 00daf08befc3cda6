//! Computes on the device which slots of a sliding layer's ring buffer a query sees. A column is one token of the text,
//! stored in slot `column % slots`.

use super::key_values::Visible;
use crate::op::ring_mask::{RingMask, ring_mask};
use burn::tensor::{Int, Tensor};

/// The number of slots in a ring buffer, and the attention window.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    slots: usize,
    /// The number of keys that a query sees, including the key at its own position.
    window: usize,
}

impl Ring {
    pub fn new(slots: usize, window: usize) -> Self {
        Self { slots, window }
    }

    /// True if the ring has exactly one slot per key of the window. The query of the last token then sees all slots.
    pub fn is_exact(&self) -> bool {
        self.slots == self.window
    }

    /// Computes which slots each query sees: the slots whose newest token lies in the query's window. The keys at the
    /// queries' own positions must already be written. `queries` is `[sequences, queries per sequence]`. `positions` lists
    /// the queries' positions, ordered by sequence.
    pub fn visible(&self, queries: [usize; 2], positions: Tensor<1, Int>) -> Visible {
        self.mask(queries, positions, true)
    }

    /// Computes [`visible`](Self::visible) for queries whose own keys are not yet in the ring buffer.
    pub fn visible_before(&self, queries: [usize; 2], positions: Tensor<1, Int>) -> Visible {
        self.mask(queries, positions, false)
    }

    fn mask(
        &self,
        [sequences, queries]: [usize; 2],
        positions: Tensor<1, Int>,
        last_is_written: bool,
    ) -> Visible {
        let options = RingMask {
            sequences,
            queries,
            slots: self.slots,
            window: self.window,
            last_is_written,
        };
        Visible {
            mask: Some(ring_mask(positions, options)),
            ..Visible::default()
        }
    }
}
