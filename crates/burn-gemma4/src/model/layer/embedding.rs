//! Rows of a table by token.

use super::random;
use burn::{
    module::{Module, Param},
    tensor::{Device, Int, Tensor},
};

/// A row for each token, times a constant.
#[derive(Module, Debug)]
pub struct Embedding {
    /// `[tokens, columns]`.
    pub weight: Param<Tensor<2>>,
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
            weight: random([tokens, columns], deviation, device),
            scale,
        }
    }

    /// `[batch, positions]` to `[batch, positions, columns]`, scaled. The scale is rounded to the table's dtype, as the
    /// models were trained.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [batch, positions] = tokens.dims();
        let table = self.weight.val();
        let [_, columns] = table.dims();
        table
            .select(0, tokens.reshape([batch * positions]))
            .reshape([batch, positions, columns])
            * self.scale
    }
}
