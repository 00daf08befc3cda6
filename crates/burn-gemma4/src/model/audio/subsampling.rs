//! The convolutions of an audio tower, which make one row of four frames.

use crate::config::audio::ConformerConfig;
use crate::model::layer::{Linear, random};
use crate::model::multimodal::{DEVIATION, LayerNorm};
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor, activation::relu, module::conv2d, ops::ConvOptions},
};

/// Two convolutions over frames and features, each with a stride of 2, and a projection.
#[derive(Module, Debug)]
pub(super) struct Subsampling {
    layer0: ConvolutionLayer,
    layer1: ConvolutionLayer,
    input_proj_linear: Linear,
}

/// A convolution of 3 x 3, a layer norm over the channels, and ReLU.
#[derive(Module, Debug)]
struct ConvolutionLayer {
    conv: Convolution,
    norm: LayerNorm,
}

#[derive(Module, Debug)]
struct Convolution {
    /// The weight, `[channels out, channels in, 3, 3]`.
    weight: Param<Tensor<4>>,
}

impl Subsampling {
    pub fn new(tower: &ConformerConfig, device: &Device) -> Self {
        let [first, second] = tower.channels;
        let layer = |input, output| ConvolutionLayer {
            conv: Convolution {
                weight: random([output, input, 3, 3], DEVIATION, device),
            },
            norm: LayerNorm::new(output, false, tower.rms_norm_eps, device),
        };
        Self {
            layer0: layer(1, first),
            layer1: layer(first, second),
            input_proj_linear: Linear::new(
                first / 4 * second,
                tower.hidden_size,
                DEVIATION,
                device,
            ),
        }
    }

    /// Computes one row for each four frames, `[frames, features]` to `[rows, hidden]`. Zeros follow the last frame, as
    /// Hugging Face Transformers masks the frames of its padding.
    pub fn forward(&self, features: Tensor<2>) -> Tensor<2> {
        let channels_first = self.layer0.forward(features.unsqueeze::<4>());
        let channels_first = self.layer1.forward(channels_first);
        let [_, channels, rows, columns] = channels_first.dims();
        let channels_last = channels_first.permute([0, 2, 3, 1]);
        self.input_proj_linear
            .rows(channels_last.reshape([rows, columns * channels]))
    }
}

impl ConvolutionLayer {
    /// Computes `[1, channels out, frames / 2, features / 2]`, rounded up.
    fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let options = ConvOptions::new([2, 2], [1, 1], [1, 1], 1);
        let output = conv2d(input, self.conv.weight.val(), None, options);
        let [_, channels, frames, features] = output.dims();
        let channels_last = output.permute([0, 2, 3, 1]);
        let normed = self
            .norm
            .forward(channels_last.reshape([frames * features, channels]));
        relu(normed)
            .reshape([1, frames, features, channels])
            .permute([0, 3, 1, 2])
    }
}
