//! Rows of a table by token.

use super::Weight;
use crate::op::linear::Matrix;
use burn::{
    module::Module,
    tensor::{Device, Int, Tensor},
};

/// A row for each token, times a constant.
#[derive(Module, Debug)]
pub struct Embedding {
    /// `[tokens, columns]`.
    pub weight: Weight,
    #[module(skip)]
    scale: f64,
}

impl Embedding {
    pub(crate) fn new(
        tokens: usize,
        columns: usize,
        scale: f64,
        deviation: f64,
        device: &Device,
    ) -> Self {
        Self {
            weight: Weight::random([tokens, columns], deviation, device),
            scale,
        }
    }

    /// What rows are multiplied by.
    #[cfg(feature = "cube")]
    pub(crate) fn scale(&self) -> f64 {
        self.scale
    }

    /// `[batch, positions]` to `[batch, positions, columns]`, scaled. The scale is rounded to the table's dtype, as the
    /// models were trained.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, positions] = tokens.dims();
        let tokens = tokens.reshape([batch * positions]);
        let rows = match self.weight.matrix() {
            Matrix::Whole(table) => table.select(0, tokens),
            Matrix::Quantized(table) => table.select(tokens).dequantized(self.weight.dtype()),
        };
        let [_, columns] = rows.dims();
        rows.reshape([batch, positions, columns]) * self.scale
    }
}
