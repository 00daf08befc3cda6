//! The convolution part of a conformer layer (Gulati et al. 2020, arXiv:2005.08100), causal in time.

use super::conformer::limited;
use crate::config::audio::ConformerConfig;
use crate::model::layer::{RmsNorm, random};
use crate::model::multimodal::{ClippedLinear, DEVIATION};
use burn::{
    module::{Module, Param},
    tensor::{
        DType, Device, Tensor,
        activation::{sigmoid, silu},
    },
};

/// A gated projection, a causal convolution of each channel, and a projection.
#[derive(Module, Debug)]
pub(super) struct LightConvolution {
    linear_start: ClippedLinear,
    linear_end: ClippedLinear,
    depthwise_conv1d: DepthwiseConvolution,
    pre_layer_norm: RmsNorm,
    conv_norm: RmsNorm,
    #[module(skip)]
    limit: f64,
}

#[derive(Module, Debug)]
struct DepthwiseConvolution {
    /// The weight, `[channels, 1, kernel]`. The last element multiplies a row itself.
    weight: Param<Tensor<3>>,
}

impl LightConvolution {
    pub fn new(tower: &ConformerConfig, device: &Device) -> Self {
        let hidden = tower.hidden_size;
        let linear =
            |input, output| ClippedLinear::new(input, output, tower.use_clipped_linears, device);
        Self {
            linear_start: linear(hidden, 2 * hidden),
            linear_end: linear(hidden, hidden),
            depthwise_conv1d: DepthwiseConvolution {
                weight: random([hidden, 1, tower.conv_kernel_size], DEVIATION, device),
            },
            pre_layer_norm: RmsNorm::new(hidden, tower.rms_norm_eps, device),
            conv_norm: RmsNorm::new(hidden, tower.rms_norm_eps, device),
            limit: tower.gradient_clipping,
        }
    }

    /// Returns each linear layer that may have bounds, with its path.
    pub fn linears_mut(&mut self, path: &str) -> Vec<(String, &mut ClippedLinear)> {
        let modules = [
            ("linear_start", &mut self.linear_start),
            ("linear_end", &mut self.linear_end),
        ];
        let linears = modules.map(|(name, linear)| (format!("{path}.{name}"), linear));
        linears.into()
    }

    /// Runs the part on the residual stream, `[rows, hidden]`.
    pub fn forward(&self, stream: Tensor<2>) -> Tensor<2> {
        let normed = self.pre_layer_norm.forward(stream.clone());
        let [values, gates] = self
            .linear_start
            .rows(normed)
            .chunk(2, 1)
            .try_into()
            .expect("the projection has twice the hidden size");
        let convolved = self.depthwise_conv1d.forward(values * sigmoid(gates));
        let normed = self.conv_norm.forward(limited(convolved, self.limit));
        self.linear_end.rows(silu(normed)) + stream
    }
}

impl DepthwiseConvolution {
    /// Convolves each column of `[rows, channels]`, in f32. Zeros precede the first row. A sum of shifted rows reads
    /// each row as often as the kernel is long, and needs no rearranged copy of the rows.
    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        let (dtype, device) = (input.dtype(), input.device());
        let [rows, channels] = input.dims();
        let weight = self.weight.val().cast(DType::F32);
        let [_, _, kernel] = weight.dims();
        let before = Tensor::zeros([kernel - 1, channels], (&device, DType::F32));
        let padded = Tensor::cat(vec![before, input.cast(DType::F32)], 0);
        let shifted = (0..kernel).map(|index| {
            let factors = weight.clone().narrow(2, index, 1).reshape([1, channels]);
            padded.clone().narrow(0, index, rows) * factors
        });
        let sum = shifted.reduce(|sum, one| sum + one);
        sum.expect("the kernel has at least one element")
            .cast(dtype)
    }
}
