//! Matrix products with the weights of a checkpoint.

pub(in crate::op) mod adapted;
#[cfg(feature = "cube")]
pub(crate) mod few_rows;
#[cfg(feature = "cube")]
pub(crate) mod grouped;
mod matrix;
#[cfg(any(feature = "cuda", all(test, feature = "flex")))]
mod product;
mod quantized;
#[cfg(feature = "cuda")]
mod sides;

pub(crate) use adapted::adapted;
#[cfg(feature = "cube")]
pub(crate) use matrix::Matrices;
pub(crate) use matrix::{Matrix, QuantizedMatrix};
#[cfg(feature = "cuda")]
pub(crate) use sides::side_by_side;

#[cfg(feature = "cube")]
use burn::backend::{ops::FloatTensorOps, tensor::FloatTensor};
#[cfg(feature = "cuda")]
use burn::tensor::DType;
use burn::tensor::Tensor;
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn rows(input: Tensor<2>, weight: impl Into<Matrix>) -> Tensor<2> {
    let weight = match weight.into() {
        Matrix::Whole(weight) => weight,
        Matrix::Quantized(weight) => return quantized::rows(input, &weight),
    };
    #[cfg(feature = "cuda")]
    if input.dims()[0] == 1 && input.dtype() == DType::F32 && product::operator(&input).is_some() {
        let outputs = weight.dims()[0];
        return (weight * input).sum_dim(1).reshape([1, outputs]);
    }
    product(input, weight.transpose())
}

/// `[rows, columns out]` times `[columns out, columns in]`: the gradient by what [`rows`] reads. Constants.
pub(crate) fn columns(gradient: Tensor<2>, weight: &Matrix) -> Tensor<2> {
    match weight {
        Matrix::Whole(weight) => product(gradient, weight.clone()),
        Matrix::Quantized(weight) => quantized::columns(gradient, weight),
    }
}

/// `[rows, inner]` times `[inner, columns]`, summed in f32.
pub(crate) fn product(lhs: Tensor<2>, rhs: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if let Some(operator) = product::operator(&lhs) {
        return operator(lhs, rhs);
    }
    lhs.matmul(rhs)
}

/// Whether [`product`] multiplies such a matrix on matrix units.
#[cfg(feature = "cube")]
fn has_matrix_units(matrix: &Tensor<2>) -> bool {
    #[cfg(feature = "cuda")]
    let is_on_cuda = product::operator(matrix).is_some();
    #[cfg(not(feature = "cuda"))]
    let is_on_cuda = false;
    is_on_cuda && matrix.dtype() != burn::tensor::DType::F32
}

/// [`product`] of what a device has.
#[cfg(feature = "cube")]
fn product_of_cube(
    lhs: FloatTensor<CubeBackend>,
    rhs: FloatTensor<CubeBackend>,
) -> FloatTensor<CubeBackend> {
    #[cfg(feature = "cuda")]
    if matches!(lhs.device, burn::backend::CubeDevice::Cuda(_)) {
        use product::ProductBackend;
        return match lhs.dtype {
            DType::F32 => CubeBackend::product_in_f32(lhs, rhs),
            _ => CubeBackend::product_of_halves(lhs, rhs),
        };
    }
    CubeBackend::float_matmul(lhs, rhs)
}
