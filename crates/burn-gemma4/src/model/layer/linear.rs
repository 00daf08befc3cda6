//! Matrix products with the weights of a checkpoint.

#[cfg(feature = "cuda")]
use super::product;
use super::{flat_rows, random};
#[cfg(feature = "cuda")]
use burn::tensor::DType;
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

/// `[batch, positions, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn project(input: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
    let [batch, positions, _] = input.dims();
    let [output, _] = weight.dims();
    rows(flat_rows(input), weight).reshape([batch, positions, output])
}

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn rows(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
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
