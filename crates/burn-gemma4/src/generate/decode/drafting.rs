//! Drafting rounds of a decoder, and passes over the draft tokens. A drafting round is one run of the drafter, which
//! consists of several drafting steps.

use super::decoder::Decoder;
#[cfg(feature = "cube")]
use super::graph::GraphCapture;
use super::guessed::{DraftTokens, Streams};
use super::next::Next;
use crate::error::Gemma4Error;
#[cfg(feature = "cube")]
use crate::model::decode_ops::DecodeOps;
use crate::speculative::drafter::{Draft, Drafter};
use burn::tensor::Tensor;

impl<'a> Decoder<'a> {
    /// Attaches the drafter that [`guess`](Self::guess) runs.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the drafter does not fit the model, or has another dtype or device than the model.
    pub fn with_drafter(self, drafter: &'a Drafter) -> Result<Self, Gemma4Error> {
        drafter.check(self.model)?;
        Ok(Self {
            // Drop the captured CUDA graphs of the previous drafter.
            #[cfg(feature = "cube")]
            graph: self.graph.map(GraphCapture::without_rounds),
            #[cfg(feature = "cube")]
            has_drafter_kernels: DecodeOps::serve(&drafter.model, self.cache.batch()),
            drafter: Some(drafter),
            ..self
        })
    }

    /// Runs the [drafter](Self::with_drafter), which proposes `count` draft tokens after `token`. The cache must not hold
    /// `token` yet.
    ///
    /// # Shapes
    /// `hidden`: `[1, hidden]`, the normalized hidden state from which `token` was chosen.
    ///
    /// # Errors
    /// Passes on the errors of [`Drafter::draft`]. Returns an error if no drafter is attached.
    pub fn guess(
        &mut self,
        token: u32,
        hidden: Tensor<2>,
        count: usize,
    ) -> Result<Draft, Gemma4Error> {
        let drafter = self.drafter()?;
        drafter.check_call(self.cache, token, hidden.dims(), count)?;
        let streams = Streams {
            rows: hidden,
            of: vec![0],
        };
        self.guess_each(&[token], &streams, count)
    }

    /// Runs [`guess`](Self::guess), and then runs [`read`](Self::read) over the token and the draft tokens in one pass.
    ///
    /// # Shapes
    /// `hidden`: `[rows, hidden]`. Row `row` is the hidden state from which `token` was chosen.
    ///
    /// # Errors
    /// Passes on the errors of [`guess`](Self::guess). Returns an error if `row` is out of range.
    pub fn guess_and_read(
        &mut self,
        token: u32,
        hidden: Tensor<2>,
        row: usize,
        count: usize,
    ) -> Result<(DraftTokens, Next<'_>), Gemma4Error> {
        let [rows, columns] = hidden.dims();
        let drafter = self.drafter()?;
        drafter.check_call(self.cache, token, [1, columns], count)?;
        if row >= rows {
            return Err(Gemma4Error::Argument {
                argument: "row",
                reason: format!("is {row}, but `hidden` has {rows} rows"),
            });
        }
        let streams = Streams {
            rows: hidden,
            of: vec![row],
        };
        self.guess_and_read_each(&[token], &streams, count)
    }

    /// Runs [`guess_and_read`](Self::guess_and_read) for all sequences, with one token per sequence. The returned draft
    /// tokens are ordered by drafting step. The rows of the returned [`Next`] are ordered by sequence.
    pub(crate) fn guess_and_read_each(
        &mut self,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> Result<(DraftTokens, Next<'_>), Gemma4Error> {
        #[cfg(feature = "cube")]
        {
            let drafter = self.drafter()?;
            // If an embedding table is in host memory, the host must look up the table rows of the draft tokens. The
            // host therefore receives the draft tokens before the pass over them.
            let reads_guesses = self.has_drafter_kernels
                && self.model.host_table.is_none()
                && self.cache.has_begun()
                && self.fits_kernels(tokens.len(), 1 + count);
            if reads_guesses && let Some(graph) = &mut self.graph {
                let (guesses, next) =
                    graph.guess_and_read(drafter, self.model, self.cache, tokens, streams, count);
                return Ok((DraftTokens::on_the_way(guesses), next.into()));
            }
        }
        let guesses = self.guess_each(tokens, streams, count)?.tokens()?;
        let mut read = Vec::with_capacity(tokens.len() * (1 + count));
        for (row, token) in tokens.iter().enumerate() {
            read.push(*token);
            read.extend(guesses[row..].iter().step_by(tokens.len()));
        }
        let next = self.read_each(&read)?;
        Ok((DraftTokens::known(guesses), next))
    }

    /// Runs [`guess`](Self::guess) for all sequences, with one token per sequence: see [`Drafter::guess`].
    fn guess_each(
        &mut self,
        tokens: &[u32],
        streams: &Streams,
        count: usize,
    ) -> Result<Draft, Gemma4Error> {
        let drafter = self.drafter()?;
        #[cfg(feature = "cube")]
        {
            if let Some(graph) = &mut self.graph {
                if self.has_drafter_kernels {
                    let (model, cache) = (self.model, &mut *self.cache);
                    return Ok(graph.guess(drafter, model, cache, tokens, streams, count));
                }
                if self.cache.is_padded() {
                    // Drop the captured graphs, which expect the first token of each sequence in slot 0. `turn_back` below
                    // moves the padding back to the first slots.
                    graph.release();
                }
            }
            self.cache.turn_back();
        }
        Ok(drafter.guess(self.model, self.cache, tokens, streams.of_each(), count))
    }

    fn drafter(&self) -> Result<&'a Drafter, Gemma4Error> {
        self.drafter.ok_or_else(|| Gemma4Error::Argument {
            argument: "drafter",
            reason: "is missing; attach one with Decoder::with_drafter".into(),
        })
    }
}
