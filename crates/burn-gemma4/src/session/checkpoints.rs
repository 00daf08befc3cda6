//! The checkpoints of a session. A checkpoint is a copy of the KV cache's ring buffers, taken between two turns of a
//! conversation. A column of the cache is one token position.

use crate::model::cache::Cache;
use crate::model::cache::checkpoint::Checkpoint;

/// The maximum size of all checkpoints together in bytes. The newest checkpoint is kept even if it alone is larger. In
/// bf16 a checkpoint takes 6 MB for E2B, and 840 MB for 31B.
const MOST_BYTES: usize = 256 << 20;

/// The checkpoints, in ascending order of the token position at which they were taken.
#[derive(Debug, Default)]
pub(super) struct Checkpoints(Vec<Checkpoint>);

impl Checkpoints {
    /// Adds a checkpoint of the cache. Then drops checkpoints, the smallest token position first, until the total size
    /// is within the limit. The newest checkpoint is always kept.
    pub fn push(&mut self, cache: &Cache) {
        self.forget_after(cache.len().saturating_sub(1));
        self.0.push(cache.checkpoint());
        let mut bytes: usize = self.0.iter().map(Checkpoint::bytes).sum();
        while bytes > MOST_BYTES && self.0.len() > 1 {
            bytes -= self.0.remove(0).bytes();
        }
    }

    /// Returns the last checkpoint at or before the token position `column`, or `None` if all checkpoints are at later
    /// positions.
    pub fn up_to(&self, column: usize) -> Option<&Checkpoint> {
        self.0
            .iter()
            .rev()
            .find(|checkpoint| checkpoint.column <= column)
    }

    /// Drops the checkpoints after the token position `column`.
    pub fn forget_after(&mut self, column: usize) {
        self.0.retain(|checkpoint| checkpoint.column <= column);
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the last checkpoint, or `None` if the list is empty.
    pub fn last(&self) -> Option<&Checkpoint> {
        self.0.last()
    }

    /// Creates a list from the checkpoint of a session file. The list is empty if `checkpoint` is `None`.
    pub fn of(checkpoint: Option<Checkpoint>) -> Self {
        Self(checkpoint.into_iter().collect())
    }
}
