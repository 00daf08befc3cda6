//! A linear layer whose input and output are clipped to bounds.

use super::DEVIATION;
use crate::model::layer::{ActivationScales, Linear};
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// The bounds of a linear layer, which come from the checkpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clip {
    /// The smallest and the largest value of the input.
    pub input: [f32; 2],
    /// The smallest and the largest value of the output.
    pub output: [f32; 2],
}

impl Clip {
    /// The bounds that clip nothing.
    const NOTHING: Self = Self {
        input: [f32::NEG_INFINITY, f32::INFINITY],
        output: [f32::NEG_INFINITY, f32::INFINITY],
    };
}

/// A linear layer, with bounds in the towers of some models.
#[derive(Module, Debug)]
pub(crate) struct ClippedLinear {
    linear: Linear,
    #[module(skip)]
    clip: Option<Clip>,
}

impl ClippedLinear {
    pub fn new(input: usize, output: usize, is_clipped: bool, device: &Device) -> Self {
        Self {
            linear: Linear::new(input, output, DEVIATION, device),
            clip: is_clipped.then_some(Clip::NOTHING),
        }
    }

    /// Projects `[rows, columns in]` to `[rows, columns out]`.
    pub fn rows(&self, input: Tensor<2>) -> Tensor<2> {
        match self.clip {
            Some(clip) => clipped(self.linear.rows(clipped(input, clip.input)), clip.output),
            None => self.linear.rows(input),
        }
    }

    /// Returns the bounds, if the layer has any.
    pub fn clip_mut(&mut self) -> Option<&mut Clip> {
        self.clip.as_mut()
    }

    /// Sets the static scales by which the input and the output are rounded. The input is clipped before it is rounded,
    /// and the output is rounded before it is clipped.
    pub fn set_activation_scales(&mut self, scales: Option<ActivationScales>) {
        self.linear.activation_scales = scales;
    }
}

fn clipped(tensor: Tensor<2>, [smallest, largest]: [f32; 2]) -> Tensor<2> {
    match smallest == f32::NEG_INFINITY && largest == f32::INFINITY {
        true => tensor,
        false => tensor.clamp(smallest, largest),
    }
}
