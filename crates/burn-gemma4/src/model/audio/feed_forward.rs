//! The feed-forward part of a conformer layer.

use super::conformer::{EPSILON, limited};
use crate::config::audio::ConformerConfig;
use crate::model::layer::RmsNorm;
use crate::model::multimodal::ClippedLinear;
use burn::{
    module::Module,
    tensor::{Device, Tensor, activation::silu},
};

/// A feed-forward part, which is added to the residual stream with a weight.
#[derive(Module, Debug)]
pub(super) struct FeedForward {
    ffw_layer_1: ClippedLinear,
    ffw_layer_2: ClippedLinear,
    pre_layer_norm: RmsNorm,
    post_layer_norm: RmsNorm,
    #[module(skip)]
    residual_weight: f64,
    #[module(skip)]
    limit: f64,
}

impl FeedForward {
    pub fn new(tower: &ConformerConfig, device: &Device) -> Self {
        let hidden = tower.hidden_size;
        let linear =
            |input, output| ClippedLinear::new(input, output, tower.use_clipped_linears, device);
        Self {
            ffw_layer_1: linear(hidden, 4 * hidden),
            ffw_layer_2: linear(4 * hidden, hidden),
            pre_layer_norm: RmsNorm::new(hidden, EPSILON, device),
            post_layer_norm: RmsNorm::new(hidden, EPSILON, device),
            residual_weight: tower.residual_weight,
            limit: tower.gradient_clipping,
        }
    }

    /// Returns each linear layer that may have bounds, with its path.
    pub fn linears_mut(&mut self, path: &str) -> Vec<(String, &mut ClippedLinear)> {
        let modules = [
            ("ffw_layer_1", &mut self.ffw_layer_1),
            ("ffw_layer_2", &mut self.ffw_layer_2),
        ];
        let linears = modules.map(|(name, linear)| (format!("{path}.{name}"), linear));
        linears.into()
    }

    /// Runs the part on the residual stream, `[rows, hidden]`.
    pub fn forward(&self, stream: Tensor<2>) -> Tensor<2> {
        let normed = self
            .pre_layer_norm
            .forward(limited(stream.clone(), self.limit));
        let output = self.ffw_layer_2.rows(silu(self.ffw_layer_1.rows(normed)));
        let normed = self.post_layer_norm.forward(limited(output, self.limit));
        normed * self.residual_weight + stream
    }
}
