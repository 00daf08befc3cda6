//! The projection of squares of pixels, in models without a vision tower.

use super::Grid;
use crate::config::vision::{ProjectionConfig, VisionConfig};
use crate::error::Gemma4Error;
use crate::model::layer::random;
use crate::model::multimodal::{BiasedLinear, DEVIATION, LayerNorm};
use crate::vision::patches::Patches;
use burn::{
    module::{Module, Param},
    tensor::{Device, Tensor, TensorData},
};

/// The epsilon of PyTorch's layer norm, which these models keep.
const EPSILON: f64 = 1e-5;

/// Projects each square of patches to one vector and adds the embedding of its place.
#[derive(Module, Debug)]
pub(super) struct PatchProjection {
    patch_ln1: LayerNorm,
    patch_dense: BiasedLinear,
    patch_ln2: LayerNorm,
    /// The embeddings of columns and of rows, `[positions, 2, columns]`.
    pos_embedding: Param<Tensor<3>>,
    pos_norm: LayerNorm,
    /// The width and height of a square in patches.
    #[module(skip)]
    side: usize,
}

impl PatchProjection {
    pub fn new(config: &VisionConfig, projection: &ProjectionConfig, device: &Device) -> Self {
        let side = config.pooling_kernel_size;
        let pixels = (config.patch_size * side).pow(2) * 3;
        let columns = projection.mm_embed_dim;
        let norm = |columns| LayerNorm::new(columns, true, EPSILON, device);
        Self {
            patch_ln1: norm(pixels),
            patch_dense: BiasedLinear::new(pixels, columns, device),
            patch_ln2: norm(columns),
            pos_embedding: random([projection.mm_posemb_size, 2, columns], DEVIATION, device),
            pos_norm: norm(columns),
            side,
        }
    }

    /// Returns one row for each square of patches, `[squares, columns]`.
    pub fn forward(&self, patches: &Patches) -> Result<Tensor<2>, Gemma4Error> {
        let table = self.pos_embedding.val();
        let [positions, _, columns] = table.dims();
        let (width, height) = (patches.columns / self.side, patches.rows / self.side);
        let grid = Grid::new(width, height, positions)?;
        let numbers = patches.numbers(self.side, 1.0, 0.0);
        let pixels = numbers.len() / (width * height);
        let numbers = TensorData::new(numbers, [width * height, pixels]);
        let numbers = Tensor::<2>::from_data(numbers, (&table.device(), table.dtype()));
        let dense = self.patch_dense.rows(self.patch_ln1.forward(numbers));
        let tables = [0, 1].map(|axis| {
            let of_axis = table.clone().narrow(1, axis, 1);
            of_axis.reshape([positions, columns])
        });
        let placed = self.patch_ln2.forward(dense) + grid.embeddings(tables);
        Ok(self.pos_norm.forward(placed))
    }
}
