//! The dense feed-forward network, gated by GELU (Shazeer 2020, arXiv:2002.05202).

use super::Linear;
use crate::op::gate::gated;
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

    /// `[batch, positions, hidden]` to the same.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let gate = self.gate_proj.forward(input.clone());
        self.down_proj
            .forward(gated(gate, self.up_proj.forward(input)))
    }
}
