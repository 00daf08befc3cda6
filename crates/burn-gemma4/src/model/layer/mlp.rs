//! The dense feed-forward network, gated by GELU (Shazeer 2020, arXiv:2002.05202).

use super::Linear;
use crate::op::gate::gated;
#[cfg(feature = "cube")]
use crate::op::linear::Matrix;
#[cfg(feature = "cube")]
use burn::module::LoraAdapter;
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// `down(gelu(gate(x)) · up(x))`.
#[derive(Module, Debug)]
pub struct Mlp {
    /// What opens the gate.
    pub gate_proj: Linear,
    /// What goes through it.
    pub up_proj: Linear,
    /// Back to the residual stream.
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

    /// Its matrices with their adapters, where each has one and is not trained itself: gate, up and down.
    #[cfg(feature = "cube")]
    pub(crate) fn adapted(&self) -> Option<[(Matrix, &LoraAdapter); 3]> {
        Some([
            self.gate_proj.adapted()?,
            self.up_proj.adapted()?,
            self.down_proj.adapted()?,
        ])
    }

    /// `[batch, positions, hidden]` to the same.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let gate = self.gate_proj.forward(input.clone());
        self.down_proj
            .forward(gated(gate, self.up_proj.forward(input)))
    }
}
