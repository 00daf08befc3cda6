//! Selective activation checkpointing: the forward does not keep some activations, and the backward computes them
//! again.

use crate::model::Gemma4Model;

impl Gemma4Model {
    /// Sets whether the backward recomputes the activations inside the dense feed-forward networks. The default is
    /// false.
    ///
    /// More than half of the activations that a training step keeps are inside these networks. Recomputation saves this
    /// memory. In exchange, the backward of a LoRA [`Adapter`](crate::checkpoint::adapter::Adapter) repeats two GEMMs
    /// per layer. The gradients do not change.
    ///
    /// The option needs the fused kernels, and adapters on all three matrices of a network.
    /// [`gradients`](Self::gradients) ignores the option, because that function recomputes whole layers.
    pub fn with_mlp_recompute(mut self, recompute: bool) -> Self {
        self.mlp_recompute = recompute;
        self
    }
}
