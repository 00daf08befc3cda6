//! The dense MLP with GeGLU (Shazeer 2020, arXiv:2002.05202).

use super::Linear;
use crate::op::geglu::gated;
#[cfg(feature = "cube")]
use crate::op::linear::Matrix;
#[cfg(feature = "cube")]
use burn::module::LoraAdapter;
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// The dense MLP: `down(gelu(gate(x)) · up(x))`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// The gate projection, whose output passes through GELU.
    pub gate_proj: Linear,
    /// The up projection, whose output is multiplied by the GELU of the gate.
    pub up_proj: Linear,
    /// The projection back to the residual stream.
    pub down_proj: Linear,
}

impl Mlp {
    pub(crate) fn new(hidden: usize, intermediate: usize, deviation: f64, device: &Device) -> Self {
        Self {
            gate_proj: Linear::new(hidden, intermediate, deviation, device),
            up_proj: Linear::new(hidden, intermediate, deviation, device),
            down_proj: Linear::new(intermediate, hidden, deviation, device),
        }
    }

    /// Returns the gate, up and down weights with their adapters, if all three have an adapter and a frozen base weight.
    #[cfg(feature = "cube")]
    pub(crate) fn adapted(&self) -> Option<[(Matrix, &LoraAdapter); 3]> {
        Some([
            self.gate_proj.adapted()?,
            self.up_proj.adapted()?,
            self.down_proj.adapted()?,
        ])
    }

    /// Applies the MLP.
    ///
    /// # Shapes
    /// `input` and the result are `[batch, positions, hidden]`.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let gate = self.gate_proj.forward(input.clone());
        self.down_proj
            .forward(gated(gate, self.up_proj.forward(input)))
    }
}
