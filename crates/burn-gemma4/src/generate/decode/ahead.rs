//! Lookahead: the decoder queues a decode step on the device before the caller requests the step.

use super::graph::PassKind;
use crate::op::reading::Reading;

/// A decode step that the decoder has already queued on the device. The step's input tokens are the tokens that the previous
/// step chose.
///
/// In a sliding layer's ring buffer, the step overwrites the oldest key and value of each sequence. No later query
/// attends to this key. The cache therefore stays valid if the decoder discards the step.
pub(super) struct Ahead {
    /// The input tokens of the step, one per row of the batch. A row's token is `None` if the previous step could not
    /// choose a token.
    tokens: Vec<Option<u32>>,
    pass: PassKind,
    /// The pending copy of the step's chosen tokens to the host. Dropping the [`Reading`] waits until the copy has finished.
    chosen: Reading,
}

impl Ahead {
    pub fn new(pass: PassKind, tokens: Vec<Option<u32>>, chosen: Reading) -> Self {
        Self {
            tokens,
            pass,
            chosen,
        }
    }

    /// Returns the tokens that the queued step chooses, if it is a `pass` and `tokens` equal the input tokens of its
    /// first rows. Returns `None` if they differ. The step's remaining rows belong to no sequence, so their input tokens
    /// do not matter.
    pub fn after(self, pass: PassKind, tokens: &[u32]) -> Option<Reading> {
        let first_rows = self.tokens.iter().take(tokens.len());
        let is_wanted =
            self.pass == pass && first_rows.copied().eq(tokens.iter().copied().map(Some));
        is_wanted.then_some(self.chosen)
    }
}
