//! Tokens and their positions on the device, where computations that are captured once read them anew.

use super::{Streams, integers};
use crate::{
    Cache,
    op::overwrite::{begin_round_with, go_on_with, overwrite_three, take_guesses_of},
};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// They are written between two runs of a graph, and by no launch of it.
pub(super) struct Inputs {
    /// `[rows]`: as many of each sequence, one sequence after the other.
    pub tokens: Tensor<1, Int>,
    /// `[rows]`: theirs.
    pub positions: Tensor<1, Int>,
    /// `[batch]`: the columns of each sequence that are written with them.
    pub lengths: Tensor<1, Int>,
}

impl Inputs {
    /// Of so many rows of so many sequences, which nobody has written yet.
    pub fn empty(rows: usize, batch: usize, device: &Device) -> Self {
        let own = |count| Tensor::empty([count], (device, DType::I32));
        Self {
            tokens: own(rows),
            positions: own(rows),
            lengths: own(batch),
        }
    }

    /// Takes as many others.
    pub fn overwrite(&self, uploaded: Uploaded) {
        overwrite_three(self.all(), uploaded.numbers);
    }

    /// Takes what was chosen after the tokens, of which each sequence has one.
    pub fn go_on(&self, chosen: Tensor<1, Int>) {
        go_on_with(self.all(), chosen);
    }

    /// Takes what a round begins with, and writes the streams before it over `hidden`, `[batch, columns]`.
    pub fn begin_round(&self, begun: Begun, hidden: Tensor<2>) {
        begin_round_with(self.all(), hidden, begun.streams, begun.numbers);
    }

    /// Takes what a round began with, and its guesses, one step's after the other.
    pub fn take_guesses(&self, first: [Tensor<1, Int>; 3], guesses: Tensor<1, Int>) {
        take_guesses_of(self.all(), first, guesses);
    }

    /// The three tensors.
    pub fn all(&self) -> [Tensor<1, Int>; 3] {
        [&self.tokens, &self.positions, &self.lengths].map(Tensor::clone)
    }

    /// How many tokens there are.
    pub fn rows(&self) -> usize {
        self.tokens.dims()[0]
    }

    pub fn device(&self) -> Device {
        self.tokens.device()
    }
}

/// Tokens that come after what a cache holds, with their positions and the lengths, one after the other.
pub(super) struct Uploaded {
    numbers: Tensor<1, Int>,
}

impl Uploaded {
    pub fn new(cache: &Cache, tokens: &[u32], device: &Device) -> Self {
        let (rows, batch) = (tokens.len(), cache.batch());
        let count = rows / batch;
        let mut numbers = integers(tokens);
        let first: Vec<_> = cache.next_positions().collect();
        for first in &first {
            numbers.extend((*first..first + count).map(|position| position as i32));
        }
        numbers.extend(first.iter().map(|first| (first + count) as i32));
        let numbers = TensorData::new(numbers, [2 * rows + batch]);
        Self {
            numbers: Tensor::from_data(numbers, (device, DType::I32)),
        }
    }
}

/// What a round begins with: a token of each sequence, its position, and the stream before it.
pub(super) struct Begun {
    /// Tokens, positions, lengths, rows of the streams, as many of each.
    numbers: Tensor<1, Int>,
    streams: Tensor<2>,
}

impl Begun {
    pub fn new(cache: &Cache, tokens: &[u32], streams: &Streams, device: &Device) -> Self {
        let mut numbers = integers(tokens);
        let first: Vec<_> = cache.next_positions().collect();
        numbers.extend(first.iter().map(|first| *first as i32));
        numbers.extend(first.iter().map(|first| (first + 1) as i32));
        numbers.extend(streams.of.iter().map(|row| *row as i32));
        let numbers = TensorData::new(numbers, [4 * tokens.len()]);
        Self {
            numbers: Tensor::from_data(numbers, (device, DType::I32)),
            streams: streams.rows.clone(),
        }
    }
}
