//! The input of a drafting round (hidden states) and its result (draft tokens). A drafting round is one run of the drafter.

use crate::error::Gemma4Error;
#[cfg(feature = "cube")]
use crate::op::reading::Reading;
use burn::tensor::Tensor;

/// Hidden states from which the model has chosen the last token of each sequence.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    /// The normalized hidden states, `[rows, hidden]`: see [`Next::hidden`](super::Next::hidden).
    pub rows: Tensor<2>,
    /// For each sequence, the index of its hidden state in `rows`.
    pub of: Vec<usize>,
}

impl Streams {
    /// Returns the hidden state of each sequence, `[batch, hidden]`.
    pub fn of_each(&self) -> Tensor<2> {
        let row = |row: &usize| self.rows.clone().narrow(0, *row, 1);
        match &self.of[..] {
            [one] => row(one),
            rows => Tensor::cat(rows.iter().map(row).collect(), 0),
        }
    }
}

/// Draft tokens that the drafter has proposed. The device may still be copying the tokens to the host.
#[derive(Debug)]
pub struct DraftTokens(Source);

#[derive(Debug)]
enum Source {
    Host(Vec<u32>),
    #[cfg(feature = "cube")]
    Device(Box<Reading>),
}

impl DraftTokens {
    pub(super) fn known(tokens: Vec<u32>) -> Self {
        Self(Source::Host(tokens))
    }

    #[cfg(feature = "cube")]
    pub(super) fn on_the_way(reading: Reading) -> Self {
        Self(Source::Device(Box::new(reading)))
    }

    /// Waits for the copy of the draft tokens to the host, and returns the tokens. The function does not wait for the model's
    /// pass over the draft tokens.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Device`] if the device failed.
    pub fn tokens(self) -> Result<Vec<u32>, Gemma4Error> {
        match self.0 {
            Source::Host(tokens) => Ok(tokens),
            #[cfg(feature = "cube")]
            Source::Device(reading) => {
                let tokens = reading.wait()?;
                Ok(tokens.into_iter().map(|token| token as u32).collect())
            }
        }
    }
}
