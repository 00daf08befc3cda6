//! An embedding table.

use super::Weight;
use crate::op::linear::Matrix;
use burn::{
    module::Module,
    tensor::{Device, Int, Tensor},
};

/// Looks up a row for each token and multiplies it by a constant.
#[derive(Module, Debug)]
pub struct Embedding {
    /// The table, `[tokens, columns]`.
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

    /// Returns the constant that multiplies the rows.
    #[cfg(feature = "cube")]
    pub(crate) fn scale(&self) -> f64 {
        self.scale
    }

    /// Looks up the tokens' rows and multiplies them by the embedding's constant. The constant is rounded to the
    /// table's dtype, as in training.
    ///
    /// # Shapes
    /// `tokens` is `[batch, positions]`; the result is `[batch, positions, columns]`.
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
