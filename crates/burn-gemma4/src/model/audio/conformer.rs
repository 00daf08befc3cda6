//! A conformer layer (Gulati et al. 2020, arXiv:2005.08100).

use super::attention::{CallTables, LocalAttention};
use super::feed_forward::FeedForward;
use super::light_convolution::LightConvolution;
use crate::config::audio::ConformerConfig;
use crate::model::layer::RmsNorm;
use crate::model::multimodal::ClippedLinear;
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// The epsilon of the norms around attention and feed-forward parts. Hugging Face Transformers does not configure it.
pub(super) const EPSILON: f64 = 1e-6;

/// A layer: a feed-forward part, attention, a convolution, and another feed-forward part.
#[derive(Module, Debug)]
pub(super) struct ConformerLayer {
    feed_forward1: FeedForward,
    feed_forward2: FeedForward,
    self_attn: LocalAttention,
    lconv1d: LightConvolution,
    norm_pre_attn: RmsNorm,
    norm_post_attn: RmsNorm,
    norm_out: RmsNorm,
    #[module(skip)]
    limit: f64,
}

impl ConformerLayer {
    pub fn new(tower: &ConformerConfig, device: &Device) -> Self {
        let norm = || RmsNorm::new(tower.hidden_size, EPSILON, device);
        Self {
            feed_forward1: FeedForward::new(tower, device),
            feed_forward2: FeedForward::new(tower, device),
            self_attn: LocalAttention::new(tower, device),
            lconv1d: LightConvolution::new(tower, device),
            norm_pre_attn: norm(),
            norm_post_attn: norm(),
            norm_out: norm(),
            limit: tower.gradient_clipping,
        }
    }

    /// Returns each linear layer that may have bounds, with its path.
    pub fn linears_mut(&mut self, path: &str) -> Vec<(String, &mut ClippedLinear)> {
        let mut linears = self
            .feed_forward1
            .linears_mut(&format!("{path}.feed_forward1"));
        linears.extend(
            self.feed_forward2
                .linears_mut(&format!("{path}.feed_forward2")),
        );
        linears.extend(self.self_attn.linears_mut(&format!("{path}.self_attn")));
        linears.extend(self.lconv1d.linears_mut(&format!("{path}.lconv1d")));
        linears
    }

    /// Runs the layer on the residual stream, `[rows, hidden]`.
    pub fn forward(&self, stream: Tensor<2>, tables: &CallTables) -> Tensor<2> {
        let stream = self.feed_forward1.forward(stream);
        let normed = self
            .norm_pre_attn
            .forward(limited(stream.clone(), self.limit));
        let attended = limited(self.self_attn.forward(normed, tables), self.limit);
        let stream = self.norm_post_attn.forward(attended) + stream;
        let stream = self.feed_forward2.forward(self.lconv1d.forward(stream));
        self.norm_out.forward(limited(stream, self.limit))
    }
}

/// Clips to the magnitude `limit`, or to the largest number of the dtype, as Hugging Face Transformers does.
pub(super) fn limited(rows: Tensor<2>, limit: f64) -> Tensor<2> {
    let largest = rows.dtype().finfo().map_or(f64::MAX, |info| info.max);
    let limit = limit.min(largest);
    rows.clamp(-limit, limit)
}
