//! Matrix products with the weights of a checkpoint.

#[cfg(feature = "cube")]
pub(crate) mod few_rows;
mod matrix;
#[cfg(any(feature = "cuda", all(test, feature = "flex")))]
mod product;
mod quantized;

pub(crate) use matrix::{Matrix, QuantizedMatrix};

#[cfg(feature = "cuda")]
use burn::tensor::DType;
use burn::tensor::Tensor;

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn rows(input: Tensor<2>, weight: impl Into<Matrix>) -> Tensor<2> {
    let weight = match weight.into() {
        Matrix::Whole(weight) => weight,
        Matrix::Quantized(weight) => return quantized::rows(input, &weight),
    };
    #[cfg(feature = "cuda")]
    if input.dims()[0] == 1 && input.dtype() == DType::F32 && product::operator(&input).is_some() {
        return (weight * input).sum_dim(1).transpose();
    }
    product(input, weight.transpose())
}

/// `[rows, inner]` times `[inner, columns]`, summed in f32.
pub(crate) fn product(lhs: Tensor<2>, rhs: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if let Some(operator) = product::operator(&lhs) {
        return operator(lhs, rhs);
    }
    lhs.matmul(rhs)
}
