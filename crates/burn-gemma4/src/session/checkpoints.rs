//! Checkpoints of a session's cache, where turns end.

use crate::{Cache, model::cache::checkpoint::Checkpoint};

/// Bytes that checkpoints take at most, but for one, which there is always: E2B's rings in bf16 are 6 MB, 31B's 840.
const MOST_BYTES: usize = 256 << 20;

/// Checkpoints, the earliest first.
#[derive(Debug, Default)]
pub(super) struct Checkpoints(Vec<Checkpoint>);

impl Checkpoints {
    /// Keeps what a cache holds now, and lets the earliest go where they are too much.
    pub fn push(&mut self, cache: &Cache) {
        self.forget_after(cache.len().saturating_sub(1));
        self.0.push(cache.checkpoint());
        let mut bytes: usize = self.0.iter().map(Checkpoint::bytes).sum();
        while bytes > MOST_BYTES && self.0.len() > 1 {
            bytes -= self.0.remove(0).bytes();
        }
    }

    /// The last one that is at no later column.
    pub fn up_to(&self, column: usize) -> Option<&Checkpoint> {
        self.0
            .iter()
            .rev()
            .find(|checkpoint| checkpoint.column <= column)
    }

    /// Forgets those after a column.
    pub fn forget_after(&mut self, column: usize) {
        self.0.retain(|checkpoint| checkpoint.column <= column);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// The last one.
    pub fn last(&self) -> Option<&Checkpoint> {
        self.0.last()
    }

    /// One that was read from elsewhere.
    pub fn of(checkpoint: Option<Checkpoint>) -> Self {
        Self(checkpoint.into_iter().collect())
    }
}
