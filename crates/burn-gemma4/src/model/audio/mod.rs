//! The audio of a multimodal model: from features to soft tokens, which stand in the place of token embeddings.

mod attention;
mod conformer;
mod feed_forward;
mod light_convolution;
mod subsampling;
mod tower;

pub(crate) use tower::ConformerPass;

use super::multimodal::{ClippedLinear, TextProjection};
use crate::audio::features::Features;
use crate::config::audio::{ConformerConfig, FrameConfig};
use burn::{
    module::Module,
    tensor::{DType, Device, Tensor, TensorData},
};
use tower::AudioTower;

/// An audio tower, and the projection of its output to the text model. The path of each parameter is the name of its
/// tensor in a checkpoint, without the prefix `model.`.
#[derive(Module, Debug)]
pub(crate) struct TowerAudio {
    audio_tower: AudioTower,
    embed_audio: TextProjection,
}

/// The audio of a model without a tower, such as 12B: the projection of frames of samples.
#[derive(Module, Debug)]
pub(crate) struct ProjectedAudio {
    embed_audio: TextProjection,
}

impl TowerAudio {
    /// Creates a tower whose weights are not loaded yet. `hidden` is the hidden size of the text model.
    pub fn new(tower: &ConformerConfig, hidden: usize, device: &Device) -> Self {
        let (columns, epsilon) = (tower.output_proj_dims, tower.rms_norm_eps);
        Self {
            audio_tower: AudioTower::new(tower, device),
            embed_audio: TextProjection::new(columns, hidden, epsilon, device),
        }
    }

    /// Returns each linear layer that may have bounds, with its path.
    pub fn linears_mut(&mut self) -> Vec<(String, &mut ClippedLinear)> {
        self.audio_tower.linears_mut("audio_tower")
    }

    /// Begins a pass over the features of a clip.
    pub fn begin(&self, features: &Features) -> ConformerPass {
        let projection = &self.embed_audio;
        let features = upload(features, &projection.device(), projection.dtype());
        self.audio_tower.begin(features)
    }

    /// Runs up to `layers` further layers. After the last layer, returns the soft tokens, `[soft tokens, hidden]`.
    pub fn advance(&self, pass: &mut ConformerPass, layers: usize) -> Option<Tensor<2>> {
        let output = self.audio_tower.advance(pass, layers)?;
        Some(self.embed_audio.forward(output))
    }
}

impl ProjectedAudio {
    /// Creates a projection whose weights are not loaded yet. `hidden` is the hidden size of the text model.
    pub fn new(frames: &FrameConfig, hidden: usize, device: &Device) -> Self {
        let (columns, epsilon) = (frames.audio_embed_dim, frames.rms_norm_eps);
        Self {
            embed_audio: TextProjection::new(columns, hidden, epsilon, device),
        }
    }

    /// Computes the soft tokens of a clip, `[soft tokens, hidden]`.
    pub fn soft_tokens(&self, features: &Features) -> Tensor<2> {
        let projection = &self.embed_audio;
        projection.forward(upload(features, &projection.device(), projection.dtype()))
    }
}

fn upload(features: &Features, device: &Device, dtype: DType) -> Tensor<2> {
    let shape = [features.frames, features.columns];
    let numbers = TensorData::new(features.numbers.clone(), shape);
    Tensor::from_data(numbers, (device, dtype))
}
