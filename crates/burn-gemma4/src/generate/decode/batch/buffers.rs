//! The buffer rows of a batch, and the graph that is valid as long as the buffers stay allocated.

use super::Batch;
#[cfg(feature = "cube")]
use crate::generate::decode::graph::GraphCapture;
#[cfg(feature = "cube")]
use crate::generate::decode::inputs::AdapterInputs;
#[cfg(feature = "cube")]
use crate::generate::decode::prefill::Prefill;
#[cfg(feature = "cube")]
use crate::model::adapters::{AdapterId, AdapterStack};
#[cfg(feature = "cube")]
use std::sync::Arc;

impl Batch {
    /// Reduces the number of buffer rows to the smallest power of two that is at least `sequences` and at least the
    /// number of expected sequences. Returns true if the number of rows has changed. Callers reduce the rows before the
    /// buffers get more slots, so that the buffers stay within [`largest_slots`](Self::largest_slots).
    pub(super) fn fit_capacity(&mut self, sequences: usize) -> bool {
        let capacity = sequences.max(self.expected).next_power_of_two();
        if capacity >= self.capacity {
            return false;
        }
        self.release();
        self.move_to_first_rows();
        self.capacity = capacity;
        self.cache.set_capacity(capacity, self.len());
        true
    }

    /// Moves the sequences to the first buffer rows. The graph must have been released.
    pub(super) fn move_to_first_rows(&mut self) {
        let count = self.len();
        let free = (0..count).filter(|row| !self.rows.contains(row));
        let free: Vec<usize> = free.collect();
        let beyond = self.rows.iter_mut().filter(|row| **row >= count);
        for (row, free) in beyond.zip(free) {
            self.cache.move_row(*row, free);
            *row = free;
        }
    }

    /// True if the batch has a graph that also serves the sequence of a prefill, whose adapter has joined already.
    #[cfg(feature = "cube")]
    pub(super) fn has_graph_of(&self, prefill: &Prefill) -> bool {
        self.graph.as_ref().is_some_and(|graph| {
            let in_graph = graph.adapters().map(|adapters| &adapters.stack);
            let serves = |id: AdapterId| in_graph.is_some_and(|stack| stack.slot(id).is_some());
            prefill.adapter().is_none_or(|adapter| serves(adapter.id()))
        })
    }

    /// True if the batch's graph multiplies by adapters, and no sequence has an adapter anymore. Such a graph would
    /// slow all further steps.
    #[cfg(feature = "cube")]
    pub(super) fn has_unused_adapters(&self) -> bool {
        let graph = self.graph.as_ref();
        graph.is_some_and(|graph| graph.adapters().is_some()) && self.adapters.stack().is_none()
    }

    /// Sets the lengths of the sequences, but keeps the buffers and the captured graph. Discards a queued step.
    #[cfg(feature = "cube")]
    pub(super) fn keep_graph(&mut self, lengths: &[usize]) {
        if let Some(graph) = &mut self.graph {
            graph.discard_lookahead();
            if let Some(adapters) = graph.adapters() {
                let (rows, count) = (&self.rows, self.capacity);
                adapters.overwrite(self.adapters.slots(&adapters.stack, rows, count));
            }
        }
        self.cache
            .set_lengths(&by_rows(&self.rows, lengths, self.capacity, 0));
    }

    /// Drops the captured graphs, which hold handles to the buffers.
    pub(super) fn release(&mut self) {
        #[cfg(feature = "cube")]
        {
            self.graph = None;
        }
    }

    /// Sets the length of each sequence in the KV cache, and prepares the decode kernels if they support the batch size.
    /// The graph must have been released.
    pub(super) fn set_lengths(&mut self, lengths: &[usize]) {
        self.move_to_first_rows();
        #[cfg(not(feature = "cube"))]
        let rows = self.len();
        #[cfg(feature = "cube")]
        let rows = {
            /// Without the decode kernels, the number of sequences in a forward pass is rounded up to a multiple of
            /// this number. Rounding keeps the set of different numbers small, because devices tune or compile kernels
            /// for each number of sequences.
            const ROWS: usize = 8;
            match self.model.is_accelerated() {
                true if self.capacity <= self.most_rows => self.capacity,
                true => self.len().next_multiple_of(ROWS).min(self.capacity),
                false => self.len(),
            }
        };
        self.cache
            .set_lengths(&by_rows(&self.rows, lengths, rows, 0));
        // The decode kernels write one buffer row per sequence, so the number of lengths must equal the number of buffer
        // rows.
        #[cfg(feature = "cube")]
        if !self.is_empty() && rows == self.capacity {
            let select = |stack: &Arc<AdapterStack>| {
                let device = self.model.device();
                let adapters = AdapterInputs::new(stack.clone(), self.capacity, &device);
                let (rows, count) = (&self.rows, self.capacity);
                adapters.overwrite(self.adapters.slots(stack, rows, count));
                adapters
            };
            let graph = GraphCapture::new(&self.model, &self.cache);
            let graph = graph.map(|graph| {
                let adapters = self.adapters.stack().map(select);
                graph.with_adapters(adapters).capturing_early()
            });
            self.graph = match self.may_capture {
                true => graph,
                false => graph.map(GraphCapture::without_graph_capture),
            };
        }
    }
}

/// Distributes one value per sequence over `count` buffer rows. `rows` has the buffer row of each sequence. The other rows
/// get the value `other`.
pub(super) fn by_rows<T: Copy>(rows: &[usize], values: &[T], count: usize, other: T) -> Vec<T> {
    let mut distributed = vec![other; count];
    for (row, value) in rows.iter().zip(values) {
        distributed[*row] = *value;
    }
    distributed
}
