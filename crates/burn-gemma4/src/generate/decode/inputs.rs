//! Tokens and their positions on the device, where computations that are captured once read them anew.

use super::integers;
use crate::{
    Cache,
    op::overwrite::{go_on_with, overwrite_three},
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
    pub fn new(uploaded: Uploaded) -> Self {
        let source = &uploaded.numbers;
        let own = |count| Tensor::empty([count], (&source.device(), source.dtype()));
        let inputs = Self {
            tokens: own(uploaded.rows),
            positions: own(uploaded.rows),
            lengths: own(uploaded.batch),
        };
        inputs.overwrite(uploaded);
        inputs
    }

    /// Takes as many others.
    pub fn overwrite(&self, uploaded: Uploaded) {
        overwrite_three(self.all(), uploaded.numbers);
    }

    /// Takes what was chosen after the tokens, of which each sequence has one.
    pub fn go_on(&self, chosen: Tensor<1, Int>) {
        go_on_with(self.all(), chosen);
    }

    fn all(&self) -> [Tensor<1, Int>; 3] {
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

/// Tokens that come after what a cache holds, with their positions and the lengths.
pub(super) struct Uploaded {
    /// One after the other.
    numbers: Tensor<1, Int>,
    rows: usize,
    batch: usize,
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
            rows,
            batch,
        }
    }
}
