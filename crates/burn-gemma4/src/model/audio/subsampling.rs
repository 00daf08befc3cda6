//! The convolutions of an audio tower, which make one row of four frames.

use crate::config::audio::ConformerConfig;
use crate::model::layer::{Linear, random};
use crate::model::multimodal::{DEVIATION, LayerNorm};
use crate::op::linear;
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor, activation::relu},
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
        let [frames, columns] = features.dims();
        let features = features.reshape([frames, columns, 1]);
        let output = self.layer1.forward(self.layer0.forward(features));
        let [rows, columns, channels] = output.dims();
        self.input_proj_linear
            .rows(output.reshape([rows, columns * channels]))
    }
}

impl ConvolutionLayer {
    /// Computes `[frames / 2, features / 2, channels out]`, rounded up, of `[frames, features, channels in]`.
    fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let [frames, features, _] = input.dims();
        let [frames, features] = [frames.div_ceil(2), features.div_ceil(2)];
        let weight = self.conv.weight.val();
        let [channels, of_input, height, width] = weight.dims();
        let weight = weight.reshape([channels, of_input * height * width]);
        // Use a GEMM, because Burn's convolution rounds f32 to tf32 on NVIDIA GPUs.
        let output = linear::rows(patches(input), weight);
        relu(self.norm.forward(output)).reshape([frames, features, channels])
    }
}

/// Returns the input of each output of a convolution of 3 x 3 with a stride of 2 and a padding of 1. `input` is
/// `[frames, features, channels]`. The result is `[outputs, channels · 9]`.
fn patches(input: Tensor<3>) -> Tensor<2> {
    let [frames, features, channels] = input.dims();
    let [frames_out, features_out] = [frames.div_ceil(2), features.div_ceil(2)];
    let padded = padded(padded(input, 0, frames_out), 1, features_out);
    let pairs = padded.reshape([frames_out + 1, 2, features_out + 1, 2, channels]);
    let places = (0..3).flat_map(|row| (0..3).map(move |column| (row, column)));
    let parts = places.map(|(row, column)| {
        pairs
            .clone()
            .narrow(0, row / 2, frames_out)
            .narrow(1, row % 2, 1)
            .narrow(2, column / 2, features_out)
            .narrow(3, column % 2, 1)
            .reshape([frames_out * features_out, channels, 1])
    });
    Tensor::cat(parts.collect(), 2).reshape([frames_out * features_out, channels * 9])
}

/// Adds one row of zeros before the rows of a dimension, and zeros after them, to `2 · (outputs + 1)` rows.
fn padded(input: Tensor<3>, dim: usize, outputs: usize) -> Tensor<3> {
    let zeros = |rows: usize| {
        let mut shape = input.dims();
        shape[dim] = rows;
        Tensor::zeros(shape, (&input.device(), input.dtype()))
    };
    let after = 2 * outputs + 1 - input.dims()[dim];
    Tensor::cat(vec![zeros(1), input.clone(), zeros(after)], dim)
}
