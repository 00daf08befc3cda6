//! The logits of a batch's sequences, and the choice of the next token from each row of logits.

use super::next::Next;
use crate::error::Gemma4Error;
use crate::generate::sampling::sampler::Sampler;
use burn::tensor::{DType, Int, Tensor, TensorData};

/// The logits of several sequences, with one row per sequence. The logits stay on the device until
/// [`choose`](Self::choose) is called.
#[derive(Debug)]
pub struct RowLogits<'a> {
    next: Next<'a>,
    /// The row of `next` that belongs to each sequence.
    rows: Vec<usize>,
}

/// The way to choose the next token of a sequence from its row of logits.
#[derive(Clone, Copy, Debug)]
pub enum RowChoice<'a> {
    /// Take the argmax.
    Argmax,
    /// Draw a token on the device with this sampler. The sampler does not record the token. If the device cannot draw
    /// the token, the row is copied to the host as with [`Logits`](Self::Logits).
    Draw(&'a Sampler),
    /// Copy the row of logits to the host.
    Logits,
}

/// The result of a [`RowChoice`] for one row of logits.
#[derive(Clone, Debug, PartialEq)]
pub enum RowResult {
    /// The chosen token, or `None` if every logit of the row is NaN or −∞.
    Token(Option<u32>),
    /// The logits of the whole vocabulary.
    Logits(Vec<f32>),
}

impl RowResult {
    /// Returns the chosen token. Returns `None` if no token is possible, or if the result is a row of logits.
    pub fn token(&self) -> Option<u32> {
        match self {
            Self::Token(token) => *token,
            Self::Logits(_) => None,
        }
    }

    /// True if a token was chosen, or if the row of logits has one that is neither NaN nor −∞.
    pub fn has_token(&self) -> bool {
        match self {
            Self::Token(token) => token.is_some(),
            Self::Logits(logits) => logits.iter().any(|logit| *logit > f32::NEG_INFINITY),
        }
    }
}

impl<'a> RowLogits<'a> {
    /// Wraps these rows of `next`, one for each sequence.
    pub(super) fn of(next: Next<'a>, rows: Vec<usize>) -> Self {
        Self { next, rows }
    }

    /// The number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// Chooses a token from each row of logits. `choices` has one element per row. Only the chosen tokens and the requested
    /// rows of logits are copied to the host.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the number of choices differs from the number of rows. Returns
    /// [`Gemma4Error::Device`] if the device failed.
    pub fn choose(self, choices: &[RowChoice<'_>]) -> Result<Vec<RowResult>, Gemma4Error> {
        if choices.len() != self.rows.len() {
            return Err(Gemma4Error::Argument {
                argument: "choices",
                reason: format!("are {}; expected {}", choices.len(), self.rows.len()),
            });
        }
        let mut results = vec![RowResult::Token(None); self.rows.len()];
        let (mut on_host, mut has_argmax) = (Vec::new(), false);
        let mut groups: Vec<Vec<(usize, &Sampler)>> = Vec::new();
        for (row, choice) in choices.iter().enumerate() {
            match choice {
                RowChoice::Argmax => has_argmax = true,
                RowChoice::Logits => on_host.push(row),
                RowChoice::Draw(sampler) => {
                    let group = groups
                        .iter_mut()
                        .find(|group| group[0].1.draws_like(sampler));
                    match group {
                        Some(group) => group.push((row, sampler)),
                        None => groups.push(vec![(row, sampler)]),
                    }
                }
            }
        }
        for group in groups {
            let (rows, samplers): (Vec<usize>, Vec<&Sampler>) = group.into_iter().unzip();
            match Next::of(self.select(&rows).unsqueeze_dim(1)).draw(&samplers) {
                Some(tokens) => {
                    for (row, token) in rows.into_iter().zip(tokens?) {
                        results[row] = RowResult::Token(token);
                    }
                }
                None => on_host.extend(rows),
            }
        }
        if !on_host.is_empty() {
            on_host.sort_unstable();
            let logits = self.select(&on_host).cast(DType::F32);
            let logits = logits
                .try_into_data()
                .map_err(|error| Gemma4Error::Device(format!("cannot read the logits: {error}")))?;
            let logits: Vec<f32> = logits.iter::<f32>().collect();
            let vocabulary = logits.len() / on_host.len();
            for (row, logits) in on_host.into_iter().zip(logits.chunks_exact(vocabulary)) {
                results[row] = RowResult::Logits(logits.to_vec());
            }
        }
        if has_argmax {
            let tokens = self.next.try_argmax()?;
            for ((result, choice), row) in results.iter_mut().zip(choices).zip(self.rows) {
                if matches!(choice, RowChoice::Argmax) {
                    *result = RowResult::Token(tokens[row]);
                }
            }
        }
        Ok(results)
    }

    /// Returns the logits of the sequences with these indices, as `[sequences, vocabulary]`.
    fn select(&self, sequences: &[usize]) -> Tensor<2> {
        let logits = self.next.rows();
        let [count, _] = logits.dims();
        let rows = sequences.iter().map(|sequence| self.rows[*sequence]);
        if rows.clone().eq(0..count) {
            return logits;
        }
        let rows: Vec<i32> = rows.map(|row| row as i32).collect();
        let shape = [rows.len()];
        let device = logits.device();
        let rows = Tensor::<1, Int>::from_data(TensorData::new(rows, shape), &device);
        logits.select(0, rows)
    }
}
