//! What a drafter begins with, and what it has guessed.

use crate::Gemma4Error;
#[cfg(feature = "cube")]
use crate::op::reading::Reading;
use burn::tensor::Tensor;

/// What the logits of each sequence's last token were made of.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    /// `[rows, hidden]`, normalised: see [`Next::hidden`](super::Next::hidden).
    pub rows: Tensor<2>,
    /// The row of each sequence.
    pub of: Vec<usize>,
}

impl Streams {
    /// The sequences' rows alone, `[batch, hidden]`.
    pub fn of_each(&self) -> Tensor<2> {
        let row = |row: &usize| self.rows.clone().narrow(0, *row, 1);
        match &self.of[..] {
            [one] => row(one),
            rows => Tensor::cat(rows.iter().map(row).collect(), 0),
        }
    }
}

/// Tokens that a drafter has guessed, on their way to the host.
#[derive(Debug)]
pub struct GuessedTokens(Source);

#[derive(Debug)]
enum Source {
    Host(Vec<u32>),
    #[cfg(feature = "cube")]
    Device(Box<Reading>),
}

impl GuessedTokens {
    pub(super) fn known(tokens: Vec<u32>) -> Self {
        Self(Source::Host(tokens))
    }

    #[cfg(feature = "cube")]
    pub(super) fn on_the_way(reading: Reading) -> Self {
        Self(Source::Device(Box::new(reading)))
    }

    /// Waits for them. They are there before what was chosen after them is.
    ///
    /// # Errors
    /// [`Gemma4Error::Device`] where the device failed.
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
