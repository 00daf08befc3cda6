//! The norm as a module.

use super::constant;
use crate::op::norm::norm;
#[cfg(feature = "cube")]
use crate::op::{
    self, flat_rows,
    residual::{Added, residual},
};
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

    /// The same with another weight.
    pub(crate) fn with_weight(&self, weight: Tensor<1>) -> Self {
        Self {
            weight: Param::from_tensor(weight),
            epsilon: self.epsilon,
        }
    }

    /// Normalises each row of the last dimension.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        norm(input, self.weight.val(), self.epsilon)
    }

    /// `stream` and what a block adds to it, normalised, `[batch, positions, columns]` each.
    pub(crate) fn add_to(&self, stream: Tensor<3>, added: Tensor<3>) -> Tensor<3> {
        #[cfg(feature = "cube")]
        if self.is_served_with(&stream) {
            let shape = stream.dims();
            let added = Added {
                stream: flat_rows(stream),
                added: flat_rows(added),
                weight: self.weight.val(),
                epsilon: self.epsilon,
            };
            return residual(added).reshape(shape);
        }
        stream + self.forward(added)
    }

    /// Whether kernels read the weight beside such a tensor.
    #[cfg(feature = "cube")]
    pub(crate) fn is_served_with<const D: usize>(&self, tensor: &Tensor<D>) -> bool {
        op::serve(tensor) && self.weight.val().dtype() == tensor.dtype()
    }

    /// What is added to the mean of squares.
    #[cfg(feature = "cube")]
    pub(crate) fn epsilon(&self) -> f64 {
        self.epsilon
    }
}
