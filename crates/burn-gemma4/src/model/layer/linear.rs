//! A matrix product as a module.

use super::random;
use crate::op::linear::project;
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor},
};

/// `output = input · weightᵀ`.
#[derive(Module, Debug)]
pub struct Linear {
    /// `[columns out, columns in]`, as checkpoints have it. Matrix products read it through its strides,
    /// so it is never transposed in memory.
    pub weight: Param<Tensor<2>>,
}

impl Linear {
    pub(crate) fn new(input: usize, output: usize, deviation: f64, device: &Device) -> Self {
        Self {
            weight: random([output, input], deviation, device),
        }
    }

    /// `[batch, positions, columns in]` to `[batch, positions, columns out]`.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        project(input, self.weight.val())
    }
}
