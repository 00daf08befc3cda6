//! A linear layer with a bias.

use super::DEVIATION;
use crate::model::layer::{Linear, Weight, constant};
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor},
};

/// A linear layer with a bias: `output = input · weightᵀ + bias`.
#[derive(Module, Debug)]
pub(in crate::model) struct BiasedLinear {
    weight: Weight,
    bias: Param<Tensor<1>>,
}

impl BiasedLinear {
    pub fn new(input: usize, output: usize, device: &Device) -> Self {
        Self {
            weight: Linear::new(input, output, DEVIATION, device).weight,
            bias: constant(0.0, [output], device),
        }
    }

    /// Projects `[rows, columns in]` to `[rows, columns out]`.
    pub fn rows(&self, input: Tensor<2>) -> Tensor<2> {
        self.weight.project(input) + self.bias.val().unsqueeze::<2>()
    }
}
