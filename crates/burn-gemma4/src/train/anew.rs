//! What the backward makes again rather than keeping it.

use crate::Gemma4Model;

impl Gemma4Model {
    /// Whether the backward of a low-rank [`Adapter`](crate::Adapter) has what is inside the dense feed-forward networks multiplied anew,
    /// two products a layer, rather than kept from the forward: their inner width is more than half of all that a step keeps. It does not
    /// by default. Gradients are the same.
    ///
    /// It is for kernels, with adapters of all three matrices of a network; [`gradients`](Self::gradients), which computes whole layers
    /// anew, does without.
    pub fn with_mlp_anew(mut self, anew: bool) -> Self {
        self.mlp_anew = anew;
        self
    }
}
