//! Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), in f32.

use super::constant;
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor},
};

/// `x / √(mean(x²) + ε) · weight` over the last dimension, in f32, rounded once to the input's dtype.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// `[columns]`. The factor itself, not what it exceeds 1 by.
    pub weight: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl RmsNorm {
    pub(crate) fn new(columns: usize, epsilon: f64, device: &Device) -> Self {
        Self::of(1.0, columns, epsilon, device)
    }

    /// With a weight other than 1 to begin with.
    pub(crate) fn of(weight: f64, columns: usize, epsilon: f64, device: &Device) -> Self {
        Self {
            weight: constant(weight, [columns], device),
            epsilon,
        }
    }

    /// Normalises each row of the last dimension.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let dtype = input.dtype();
        let weight = self.weight.val().cast(DType::F32).unsqueeze::<D>();
        (normalize_f32(input, self.epsilon) * weight).cast(dtype)
    }
}

/// The norm without a weight.
pub(crate) fn normalize<const D: usize>(input: Tensor<D>, epsilon: f64) -> Tensor<D> {
    let dtype = input.dtype();
    normalize_f32(input, epsilon).cast(dtype)
}

fn normalize_f32<const D: usize>(input: Tensor<D>, epsilon: f64) -> Tensor<D> {
    let input = input.cast(DType::F32);
    let mean = input.clone().square().mean_dim(D - 1);
    input / (mean + epsilon).sqrt()
}
