//! Tokens and their positions on the device, where computations that are captured once read them anew.

use super::integers;
use crate::{Cache, op::overwrite::overwrite_halves};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

/// `[rows]` each: as many of each sequence, one sequence after the other. They are written between two runs of a graph, and by no
/// launch of it.
pub(super) struct Inputs {
    pub tokens: Tensor<1, Int>,
    pub positions: Tensor<1, Int>,
}

impl Inputs {
    pub fn new(uploaded: Uploaded) -> Self {
        let [both] = uploaded.0.dims();
        let own = || Tensor::empty([both / 2], (&uploaded.0.device(), uploaded.0.dtype()));
        let inputs = Self {
            tokens: own(),
            positions: own(),
        };
        inputs.overwrite(uploaded);
        inputs
    }

    /// Takes as many others.
    pub fn overwrite(&self, uploaded: Uploaded) {
        overwrite_halves(self.tokens.clone(), self.positions.clone(), uploaded.0);
    }

    /// Tokens.
    pub fn rows(&self) -> usize {
        self.tokens.dims()[0]
    }

    pub fn device(&self) -> Device {
        self.tokens.device()
    }
}

/// Tokens that come after what a cache holds, then their positions.
pub(super) struct Uploaded(Tensor<1, Int>);

impl Uploaded {
    pub fn new(cache: &Cache, tokens: &[u32], device: &Device) -> Self {
        let count = tokens.len() / cache.batch();
        let mut both = integers(tokens);
        for first in cache.next_positions() {
            both.extend((first..first + count).map(|position| position as i32));
        }
        let both = TensorData::new(both, [2 * tokens.len()]);
        Self(Tensor::from_data(both, (device, DType::I32)))
    }
}
