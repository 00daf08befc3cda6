//! The RMS norm as a module.

use super::constant;
use crate::op::norm::norm;
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor},
};

/// The RMS norm `x / √(mean(x²) + ε) · weight` over the last dimension. The norm computes in f32 and rounds once.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// The weight, `[columns]`. It multiplies the normalized input directly, without the `1 +` of earlier Gemma models.
    pub weight: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl RmsNorm {
    pub(crate) fn new(columns: usize, epsilon: f64, device: &Device) -> Self {
        Self::of(1.0, columns, epsilon, device)
    }

    /// Creates a norm whose weight is initialized with `weight` instead of 1.
    pub(crate) fn of(weight: f64, columns: usize, epsilon: f64, device: &Device) -> Self {
        Self {
            weight: constant(weight, [columns], device),
            epsilon,
        }
    }

    /// Normalizes along the last dimension.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        norm(input, self.weight.val(), self.epsilon)
    }

    /// Returns the epsilon that is added to the mean of squares.
    pub(crate) fn epsilon(&self) -> f64 {
        self.epsilon
    }
}
