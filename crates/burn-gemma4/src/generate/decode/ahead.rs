//! Lookahead: the decoder queues a decode step on the device before the caller requests that step. A column of the KV cache is
//! one token position of every sequence.

use crate::op::reading::Reading;

/// A queued decode step. Its input tokens are the tokens that the previous step chose.
///
/// The step writes keys and values to the column after the cache's last column. In a sliding layer's ring buffer the new column
/// overwrites an old column. The overwrite does no harm even if the step is discarded, because the old column is already
/// outside the window of every later query.
pub(super) struct Ahead {
    /// The input tokens of the step, one per sequence. A sequence for which the previous step could not choose a token has
    /// `None`.
    tokens: Vec<Option<u32>>,
    /// The pending copy, from the device to the host, of the tokens that the step chooses. Dropping the [`Reading`] waits for
    /// the copy.
    chosen: Reading,
}

impl Ahead {
    pub fn new(tokens: Vec<Option<u32>>, chosen: Reading) -> Self {
        Self { tokens, chosen }
    }

    /// Returns the tokens that the step chooses, if `tokens` are the input tokens of the step. Returns `None` otherwise.
    pub fn after(self, tokens: &[u32]) -> Option<Reading> {
        let tokens = tokens.iter().copied().map(Some);
        self.tokens
            .iter()
            .copied()
            .eq(tokens)
            .then_some(self.chosen)
    }
}
