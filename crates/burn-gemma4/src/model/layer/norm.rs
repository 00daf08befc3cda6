//! The norm as a module.

use super::constant;
use crate::op::norm::norm;
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor},
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
        norm(input, self.weight.val(), self.epsilon)
    }

    /// What is added to the mean of squares.
    pub(crate) fn epsilon(&self) -> f64 {
        self.epsilon
    }
}
