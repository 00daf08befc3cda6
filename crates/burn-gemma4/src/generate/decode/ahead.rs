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

    /// Returns the tokens that the queued step chooses, if it is a `pass` over `tokens`. Returns `None` otherwise. A row
    /// without a token belongs to no sequence, so its input token does not matter.
    pub fn after(self, pass: PassKind, tokens: &[Option<u32>]) -> Option<Reading> {
        let mut rows = tokens.iter().zip(&self.tokens);
        let is_wanted =
            self.pass == pass && rows.all(|(token, input)| token.is_none() || token == input);
        is_wanted.then_some(self.chosen)
    }
}
