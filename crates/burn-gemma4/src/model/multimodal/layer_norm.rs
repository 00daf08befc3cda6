//! The layer norm of vision and audio.

use crate::model::layer::constant;
use burn::{
    module::{Module, Param},
    tensor::{DType, Device, Tensor},
};

/// The layer norm `(x - mean(x)) / √(variance(x) + ε) · weight + bias` over the last dimension, computed in f32. A norm
/// without a bias adds nothing.
#[derive(Module, Debug)]
pub(in crate::model) struct LayerNorm {
    weight: Param<Tensor<1>>,
    bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    epsilon: f64,
}

impl LayerNorm {
    pub fn new(columns: usize, has_bias: bool, epsilon: f64, device: &Device) -> Self {
        Self {
            weight: constant(1.0, [columns], device),
            bias: has_bias.then(|| constant(0.0, [columns], device)),
            epsilon,
        }
    }

    /// Normalizes `[rows, columns]`.
    pub fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let dtype = input.dtype();
        let input = input.cast(DType::F32);
        let centered = input.clone() - input.mean_dim(1);
        let variance = centered.clone().square().mean_dim(1);
        let row = |param: &Param<Tensor<1>>| param.val().cast(DType::F32).unsqueeze::<2>();
        let scaled = centered / (variance + self.epsilon).sqrt() * row(&self.weight);
        let moved = match &self.bias {
            Some(bias) => scaled + row(bias),
            None => scaled,
        };
        moved.cast(dtype)
    }
}
