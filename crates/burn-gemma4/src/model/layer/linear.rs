//! A matrix product as a module.

use super::random;
use crate::op::{flat_rows, linear::rows};
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
        let [batch, positions, _] = input.dims();
        let rows = self.rows(flat_rows(input));
        let [_, output] = rows.dims();
        rows.reshape([batch, positions, output])
    }

    /// `[rows, columns in]` to `[rows, columns out]`. What a low-rank adapter adds goes through its factors, in the dtype of the
    /// rows: their product, of the weight's size, is never there, nor is its gradient.
    pub(crate) fn rows(&self, input: Tensor<2>) -> Tensor<2> {
        let Some(adapter) = self.weight.adapter() else {
            return rows(input, self.weight.val());
        };
        let dtype = input.dtype();
        let [reads, writes] = [&adapter.b, &adapter.a].map(|factor| factor.val().cast(dtype));
        let added = rows(rows(input.clone(), reads), writes);
        rows(input, self.weight.base()) + added * adapter.scale
    }
}
