//! Sequences that join a batch after their prefill.

use super::Batch;
use crate::error::Gemma4Error;
use crate::generate::decode::prefill::Prefill;
use crate::model::cache::Cache;
use std::ops::Range;
#[cfg(feature = "cube")]
use std::sync::Arc;

impl Batch {
    /// Adds the sequence of a finished prefill, and returns the sequence's index. The sequence keeps the prefill's
    /// [adapter](Prefill::with_adapter). The same prefill may join several times, to
    /// generate several answers to one prompt.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if tokens of the prompt remain, or if the prefill's KV cache has another
    /// format.
    pub fn join(&mut self, prefill: &Prefill) -> Result<usize, Gemma4Error> {
        Ok(self.join_all(&[prefill])?.start)
    }

    /// Adds the sequences of several finished prefills in their order, and returns the sequences' indices. A prefill
    /// may occur several times, as in [`join`](Self::join).
    ///
    /// While the batch has a captured graph and free buffer rows, one launch per layer copies the keys and values of
    /// prompts that were [read in one pass](Prefill::read_packed). Otherwise each prompt is copied by itself,
    /// once for consecutive equal prefills.
    ///
    /// # Errors
    /// Passes on the errors of [`join`](Self::join). After an error no sequence has been added.
    pub fn join_all(&mut self, prefills: &[&Prefill]) -> Result<Range<usize>, Gemma4Error> {
        for prefill in prefills {
            self.check_prefill(prefill)?;
        }
        let first = self.len();
        let sequences = first + prefills.len();
        #[cfg(feature = "cube")]
        let sequences = sequences.min(self.most_rows);
        let expected = self.expected.max(sequences);
        // The KV cache of the last packed prompt that was copied by itself. Further answers to the prompt use it again.
        let mut unpacked: Option<(&Prefill, Cache)> = None;
        let mut joined = 0;
        while let Some(next) = prefills.get(joined).copied() {
            let is_next = |prefill: &Prefill| std::ptr::eq(prefill, next);
            #[cfg(feature = "cube")]
            if joined == 0 || !is_next(prefills[joined - 1]) {
                let copied = self.overwrite_packed(&prefills[joined..], expected);
                if copied > 0 {
                    joined += copied;
                    continue;
                }
            }
            unpacked = match unpacked.take() {
                Some((prefill, cache)) if is_next(prefill) => Some((prefill, cache)),
                _ => next.unpacked_cache().map(|cache| (next, cache)),
            };
            let cache = unpacked.as_ref().map_or(next.cache(), |(_, cache)| cache);
            self.join_one(next, cache, expected);
            joined += 1;
        }
        Ok(first..self.len())
    }

    fn check_prefill(&self, prefill: &Prefill) -> Result<(), Gemma4Error> {
        let refuse = |reason: String| {
            let argument = "prefill";
            Err(Gemma4Error::Argument { argument, reason })
        };
        if prefill.remaining() > 0 {
            return refuse(format!(
                "has {} tokens left; expected 0",
                prefill.remaining()
            ));
        }
        if prefill.cache().kind() != self.kind {
            return refuse("has a KV cache of another format than the batch".into());
        }
        Ok(())
    }

    /// Adds the sequence of a finished prefill, whose keys and values are in `cache`. If new buffers are needed, they
    /// get rows for `expected` sequences.
    fn join_one(&mut self, prefill: &Prefill, cache: &Cache, expected: usize) {
        let mut lengths = self.lengths();
        self.adapters.join(prefill.adapter(), &self.model.device());
        #[cfg(feature = "cube")]
        if self.has_graph_of(prefill)
            && expected <= self.capacity
            && self.cache.has_slots_for(cache.len())
            && let Some(row) = (0..self.capacity).find(|row| !self.rows.contains(row))
        {
            self.cache.overwrite_row(row, cache);
            lengths.push(cache.len());
            self.rows.push(row);
            self.keep_graph(&lengths);
            return;
        }
        self.release();
        self.move_to_first_rows();
        self.fit_capacity((self.len() + 1).max(expected));
        let capacity = (self.len() + 1).max(expected).next_power_of_two();
        if capacity > self.capacity {
            self.cache.set_capacity(capacity, self.len());
            self.capacity = capacity;
        }
        let index = self.len();
        self.cache.write_row(index, cache, self.capacity);
        lengths.push(cache.len());
        self.rows.push(index);
        self.set_lengths(&lengths);
    }

    /// Adds the first of `prefills` that were read in one pass, with one launch per layer. Returns their number. The
    /// number is 0 if the batch has no graph, no free row, or too few slots for the first prompt.
    #[cfg(feature = "cube")]
    fn overwrite_packed(&mut self, prefills: &[&Prefill], expected: usize) -> usize {
        let Some(packed) = prefills.first().and_then(|prefill| prefill.packed()) else {
            return 0;
        };
        if self.graph.is_none() || expected > self.capacity {
            return 0;
        }
        let key_values = packed.key_values.clone();
        let free = (0..self.capacity).filter(|row| !self.rows.contains(row));
        let mut rows: Vec<(usize, usize)> = Vec::new();
        let mut lengths = self.lengths();
        for (prefill, row) in prefills.iter().zip(free) {
            let tokens = prefill.tokens().len();
            match prefill.packed() {
                Some(packed)
                    if Arc::ptr_eq(&packed.key_values, &key_values)
                        && rows.iter().all(|(index, _)| *index != packed.index)
                        && self.cache.has_slots_for(tokens) =>
                {
                    rows.push((packed.index, row));
                    lengths.push(tokens);
                }
                _ => break,
            }
        }
        if rows.is_empty() {
            return 0;
        }
        self.cache.overwrite_rows(&key_values, &rows);
        for (_, row) in &rows {
            self.adapters.join(None, &self.model.device());
            self.rows.push(*row);
        }
        self.keep_graph(&lengths);
        rows.len()
    }
}
