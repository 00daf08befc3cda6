//! The audio tower: a conformer over log-mel frames.

use super::attention::CallTables;
use super::conformer::ConformerLayer;
use super::subsampling::Subsampling;
use crate::config::audio::ConformerConfig;
use crate::model::multimodal::{BiasedLinear, ClippedLinear};
use burn::{
    module::Module,
    tensor::{Device, Tensor},
};

/// A pass of an audio tower over a clip, which may pause between two layers.
#[derive(Clone, Debug)]
pub(crate) struct ConformerPass {
    /// The residual stream, `[rows, hidden]`.
    stream: Tensor<2>,
    tables: CallTables,
    /// The number of layers that have run.
    layers: usize,
}

/// An audio tower. The names of the fields are those of the checkpoint's tensors.
#[derive(Module, Debug)]
pub(super) struct AudioTower {
    subsample_conv_projection: Subsampling,
    layers: Vec<ConformerLayer>,
    output_proj: BiasedLinear,
    #[module(skip)]
    window: usize,
}

impl AudioTower {
    pub fn new(tower: &ConformerConfig, device: &Device) -> Self {
        let layers = (0..tower.num_hidden_layers).map(|_| ConformerLayer::new(tower, device));
        Self {
            subsample_conv_projection: Subsampling::new(tower, device),
            layers: layers.collect(),
            output_proj: BiasedLinear::new(tower.hidden_size, tower.output_proj_dims, device),
            window: tower.window,
        }
    }

    /// Returns each linear layer that may have bounds, with its path. `path` is the tower's path.
    pub fn linears_mut(&mut self, path: &str) -> Vec<(String, &mut ClippedLinear)> {
        let layers = self.layers.iter_mut().enumerate();
        layers
            .flat_map(|(index, layer)| layer.linears_mut(&format!("{path}.layers.{index}")))
            .collect()
    }

    /// Begins a pass over features, `[frames, features]`.
    pub fn begin(&self, features: Tensor<2>) -> ConformerPass {
        let stream = self.subsample_conv_projection.forward(features);
        let [rows, hidden] = stream.dims();
        let (dtype, device) = (stream.dtype(), stream.device());
        ConformerPass {
            tables: CallTables::new(rows, self.window, hidden, dtype, &device),
            stream,
            layers: 0,
        }
    }

    /// Runs up to `layers` further layers. After the last layer, returns the tower's output, `[soft tokens, columns]`.
    pub fn advance(&self, pass: &mut ConformerPass, layers: usize) -> Option<Tensor<2>> {
        for layer in self.layers.iter().skip(pass.layers).take(layers) {
            pass.stream = layer.forward(pass.stream.clone(), &pass.tables);
            pass.layers += 1;
        }
        let is_last = pass.layers == self.layers.len();
        is_last.then(|| self.output_proj.rows(pass.stream.clone()))
    }
}
