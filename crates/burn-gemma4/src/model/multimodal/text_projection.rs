//! The projection of soft tokens to the text model.

use super::DEVIATION;
use crate::model::layer::Linear;
use crate::op::norm::normalize;
use burn::{
    module::Module,
    tensor::{DType, Device, Tensor},
};

/// A norm without a weight, and a projection to the hidden size of the text model.
#[derive(Module, Debug)]
pub(in crate::model) struct TextProjection {
    embedding_projection: Linear,
    #[module(skip)]
    epsilon: f64,
}

impl TextProjection {
    pub fn new(columns: usize, hidden: usize, epsilon: f64, device: &Device) -> Self {
        Self {
            embedding_projection: Linear::new(columns, hidden, DEVIATION, device),
            epsilon,
        }
    }

    /// Projects `[soft tokens, columns]` to `[soft tokens, hidden]`. The result has the dtype of the weights.
    pub fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let normed = normalize(input, self.epsilon);
        self.embedding_projection.rows(normed.cast(self.dtype()))
    }

    /// The dtype of the weights.
    pub fn dtype(&self) -> DType {
        self.embedding_projection.weight.dtype()
    }

    /// The device that holds the weights.
    pub fn device(&self) -> Device {
        self.embedding_projection.weight.device()
    }
}
