//! GEMMs with a float matrix or a quantized matrix.

use super::matrix::Matrix;
use super::whole::{product, whole_rows};
use crate::op::quantized_matmul;
use burn::tensor::Tensor;

/// Multiplies `[rows, columns in]` by the transpose of `weight`, `[columns out, columns in]`. The output is
/// `[rows, columns out]`.
pub(crate) fn rows(input: Tensor<2>, weight: impl Into<Matrix>) -> Tensor<2> {
    match weight.into() {
        Matrix::Whole(weight) => whole_rows(input, weight),
        Matrix::Quantized(weight) => quantized_matmul::rows(input, &weight),
    }
}

/// Multiplies `[rows, columns out]` by `[columns out, columns in]`: the gradient of [`rows`] with respect to its input.
/// Autodiff tracks neither argument.
pub(crate) fn columns(gradient: Tensor<2>, weight: &Matrix) -> Tensor<2> {
    match weight {
        Matrix::Whole(weight) => product(gradient, weight.clone()),
        Matrix::Quantized(weight) => quantized_matmul::columns(gradient, weight),
    }
}
