//! The adapters of a batch's sequences.

use crate::model::adapters::{AdapterId, AdapterStack, LoadedAdapter, NO_ADAPTER, PassAdapters};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::sync::Arc;

/// The adapter of each sequence of a batch, and the stack with which one decode step serves all of them.
///
/// The stack keeps the adapters of sequences that have left, until the batch is empty or the adapter is unloaded. A new
/// stack needs a new CUDA graph. The stack grows when a sequence with another adapter joins.
#[derive(Debug, Default)]
pub(super) struct BatchAdapters {
    /// The adapter of each sequence, in the order of the sequences' indices.
    of_sequences: Vec<Option<AdapterId>>,
    stack: Option<Arc<AdapterStack>>,
}

impl BatchAdapters {
    /// Adds the adapter of a new sequence. Builds a new stack if the current stack does not contain the adapter.
    pub fn join(&mut self, adapter: Option<&Arc<LoadedAdapter>>, device: &Device) {
        self.of_sequences.push(adapter.map(|adapter| adapter.id()));
        let Some(adapter) = adapter else {
            return;
        };
        let stacked = self
            .stack
            .as_ref()
            .map_or(&[][..], |stack| stack.adapters());
        if stacked.iter().all(|other| other.id() != adapter.id()) {
            let mut adapters = stacked.to_vec();
            adapters.push(adapter.clone());
            self.stack = Some(Arc::new(AdapterStack::new(adapters, device)));
        }
    }

    /// Removes the adapter of the sequence at `index`. The last sequence moves to this index.
    pub fn leave(&mut self, index: usize) {
        self.of_sequences.swap_remove(index);
    }

    /// Removes an adapter from the stack, and returns true if the stack has changed. An adapter that a sequence uses
    /// stays.
    pub fn forget(&mut self, id: AdapterId, device: &Device) -> bool {
        let Some(stack) = &self.stack else {
            return false;
        };
        if stack.slot(id).is_none() || self.of_sequences.contains(&Some(id)) {
            return false;
        }
        let others = stack.adapters().iter();
        let others: Vec<_> = others.filter(|other| other.id() != id).cloned().collect();
        let is_empty = others.is_empty();
        self.stack = (!is_empty).then(|| Arc::new(AdapterStack::new(others, device)));
        true
    }

    /// Returns the stack, or `None` if no sequence has an adapter.
    pub fn stack(&self) -> Option<&Arc<AdapterStack>> {
        let is_used = self.of_sequences.iter().any(Option::is_some);
        self.stack.as_ref().filter(|_| is_used)
    }

    /// Returns the slot of each of `count` buffer rows in `stack`. Rows without a sequence have no adapter. `rows` has the
    /// buffer row of each sequence.
    pub fn slots(&self, stack: &AdapterStack, rows: &[usize], count: usize) -> Vec<i32> {
        let mut slots = vec![NO_ADAPTER; count];
        for (id, row) in self.of_sequences.iter().zip(rows) {
            let slot = id.and_then(|id| stack.slot(id));
            slots[*row] = slot.unwrap_or(NO_ADAPTER);
        }
        slots
    }

    /// Returns the adapters of a step over `count` buffer rows, or `None` if no sequence has an adapter. `rows` has the
    /// buffer row of each sequence.
    pub fn pass(&self, rows: &[usize], count: usize, device: &Device) -> Option<PassAdapters> {
        let stack = self.stack()?;
        let slots = TensorData::new(self.slots(stack, rows, count), [count]);
        let slots = Tensor::<1, Int>::from_data(slots, (device, DType::I32));
        Some(stack.pass(&slots))
    }
}
