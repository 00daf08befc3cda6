//! What queries see in a ring whose columns are in any order, told from positions on the device.

use super::key_values::Visible;
use crate::op::ring::{RingMask, ring_mask};
use burn::tensor::{Int, Tensor};

/// A ring of a sliding layer.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    slots: usize,
    /// Keys that a query sees, its own included.
    window: usize,
}

impl Ring {
    pub fn new(slots: usize, window: usize) -> Self {
        Self { slots, window }
    }

    /// Whether it has no more slots than a query sees keys, so that the last column's query sees all of it.
    pub fn is_exact(&self) -> bool {
        self.slots == self.window
    }

    /// What queries of sequences, `[sequences, queries]`, see that are at these positions, a sequence's one after the other, whose own columns are the last ones: the newest
    /// column of each slot, if there is one and it is in the window. There may be more positions behind them.
    pub fn visible(&self, queries: [usize; 2], positions: Tensor<1, Int>) -> Visible {
        self.mask(queries, positions, true)
    }

    /// The same of queries before whose columns the last ones are.
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
