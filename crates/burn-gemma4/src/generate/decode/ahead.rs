//! Lookahead: the decoder queues a decode step on the device before the caller requests the step.

use crate::op::reading::Reading;

/// A queued decode step. Its input tokens are the tokens that the previous step chose.
///
/// In a sliding layer's ring buffer, the step overwrites the oldest keys and values. The overwrite does no harm even if
/// the step is discarded, because no later query attends to these keys.
pub(super) struct Ahead {
    /// The input tokens of the step, one per sequence. `None` if the previous step could not choose a token.
    tokens: Vec<Option<u32>>,
    /// The pending copy of the step's chosen tokens to the host. Dropping the [`Reading`] waits for the copy.
    chosen: Reading,
}

impl Ahead {
    pub fn new(tokens: Vec<Option<u32>>, chosen: Reading) -> Self {
        Self { tokens, chosen }
    }

    /// Returns the tokens that the queued step chooses, if `tokens` are its input tokens. Returns `None` otherwise.
    pub fn after(self, tokens: &[u32]) -> Option<Reading> {
        let tokens = tokens.iter().copied().map(Some);
        self.tokens
            .iter()
            .copied()
            .eq(tokens)
            .then_some(self.chosen)
    }
}
