//! The layer norm of models without a vision tower.

use crate::model::layer::constant;
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor},
};

/// The epsilon of PyTorch's layer norm, which these models keep.
const EPSILON: f64 = 1e-5;

/// The layer norm `(x - mean(x)) / √(variance(x) + ε) · weight + bias` over the last dimension, computed in f32.
#[derive(Module, Debug)]
pub(super) struct LayerNorm {
    weight: Param<Tensor<1>>,
    bias: Param<Tensor<1>>,
}

impl LayerNorm {
    pub fn new(columns: usize, device: &Device) -> Self {
        Self {
            weight: constant(1.0, [columns], device),
            bias: constant(0.0, [columns], device),
        }
    }

    /// Normalizes `[rows, columns]`.
    pub fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let dtype = input.dtype();
        let input = input.cast(DType::F32);
        let centered = input.clone() - input.mean_dim(1);
        let variance = centered.clone().square().mean_dim(1);
        let [weight, bias] =
            [&self.weight, &self.bias].map(|param| param.val().cast(DType::F32).unsqueeze::<2>());
        (centered / (variance + EPSILON).sqrt() * weight + bias).cast(dtype)
    }
}
