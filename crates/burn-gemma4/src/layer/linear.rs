//! Matrix products with the weights of a checkpoint.

use super::random;
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor},
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
    let [batch, positions, columns] = input.dims();
    let [output, _] = weight.dims();
    rows(input.reshape([batch * positions, columns]), weight).reshape([batch, positions, output])
}

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn rows(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    if !multiplies_in_tf32(&input) {
        return input.matmul(weight.transpose());
    }
    if input.dims()[0] == 1 {
        return (weight * input).sum_dim(1).transpose();
    }
    let (input, weight) = (Parts::of(input), Parts::of(weight.transpose()));
    let product = |input: &Tensor<2>, weight: &Tensor<2>| input.clone().matmul(weight.clone());
    // The smallest first.
    product(&input.low, &weight.low)
        + product(&input.high, &weight.low)
        + product(&input.low, &weight.high)
        + product(&input.high, &weight.high)
}

/// An f32 matrix as the sum of two that tf32 holds: 8 bits, which it holds exactly, and the other 16, of which it rounds the
/// last (Ootomo and Yokota 2022, arXiv:2203.03341).
struct Parts {
    high: Tensor<2>,
    low: Tensor<2>,
}

impl Parts {
    fn of(matrix: Tensor<2>) -> Self {
        // Detached, so that the whole gradient goes through the other part: casts would round it.
        let high = matrix.clone().detach().cast(DType::BF16).cast(DType::F32);
        Self {
            low: matrix - high.clone(),
            high,
        }
    }
}

/// Whether Burn multiplies these f32 matrices with tensor cores that read 11 of their 24 bits: on NVIDIA GPUs, and there is no
/// setting against it.
#[cfg(feature = "cuda")]
fn multiplies_in_tf32(matrix: &Tensor<2>) -> bool {
    use burn::backend::{CubeDevice, DispatchDevice};
    let device = matrix.device().without_autodiff();
    matrix.dtype() == DType::F32
        && matches!(
            device.as_dispatch(),
            DispatchDevice::Cube(CubeDevice::Cuda(_))
        )
}

#[cfg(not(feature = "cuda"))]
fn multiplies_in_tf32(_matrix: &Tensor<2>) -> bool {
    false
}
