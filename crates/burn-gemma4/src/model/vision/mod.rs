//! The vision of a multimodal model: from patches to soft tokens, which stand in the place of token embeddings.

mod projection;
mod rotation;
mod tower;

pub(crate) use tower::TowerPass;

use super::multimodal::{ClippedLinear, TextProjection};
use crate::config::vision::{ProjectionConfig, TowerConfig, VisionConfig};
use crate::error::Gemma4Error;
use crate::vision::patches::Patches;
use burn::{
    module::Module,
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use projection::PatchProjection;
use tower::VisionTower;

/// A part of a model that computes soft tokens from the patches of an image. The path of each parameter is the name of
/// its tensor in a checkpoint, without the prefix `model.`.
pub(crate) trait Vision: Module {
    /// The state between two calls of [`advance`](Self::advance).
    type Pass;

    /// Begins a pass over the patches of an image.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Argument`] if the image has more rows or columns than the model has positions.
    fn begin(&self, patches: &Patches) -> Result<Self::Pass, Gemma4Error>;

    /// Runs up to `layers` further layers. After the last layer, returns the soft tokens, `[soft tokens, hidden]`.
    fn advance(&self, pass: &mut Self::Pass, layers: usize) -> Option<Tensor<2>>;
}

/// A vision tower, and the projection of its output to the text model.
#[derive(Module, Debug)]
pub(crate) struct TowerVision {
    vision_tower: VisionTower,
    embed_vision: TextProjection,
}

/// The vision of a model without a tower, such as 12B.
#[derive(Module, Debug)]
pub(crate) struct ProjectedVision {
    vision_embedder: PatchProjection,
    embed_vision: TextProjection,
}

impl TowerVision {
    /// Creates a tower whose weights are not loaded yet. `hidden` is the hidden size of the text model.
    pub fn new(config: &VisionConfig, tower: &TowerConfig, hidden: usize, device: &Device) -> Self {
        Self {
            vision_tower: VisionTower::new(config, tower, device),
            embed_vision: TextProjection::new(
                tower.hidden_size,
                hidden,
                tower.rms_norm_eps,
                device,
            ),
        }
    }

    /// Returns each linear layer that may have bounds, with its path.
    pub fn linears_mut(&mut self) -> Vec<(String, &mut ClippedLinear)> {
        self.vision_tower.linears_mut("vision_tower")
    }
}

impl Vision for TowerVision {
    type Pass = TowerPass;

    fn begin(&self, patches: &Patches) -> Result<TowerPass, Gemma4Error> {
        self.vision_tower.begin(patches)
    }

    fn advance(&self, pass: &mut TowerPass, layers: usize) -> Option<Tensor<2>> {
        let pooled = self.vision_tower.advance(pass, layers)?;
        Some(self.embed_vision.forward(pooled))
    }
}

impl ProjectedVision {
    /// Creates a projection whose weights are not loaded yet. `hidden` is the hidden size of the text model.
    pub fn new(
        config: &VisionConfig,
        projection: &ProjectionConfig,
        hidden: usize,
        device: &Device,
    ) -> Self {
        let (columns, epsilon) = (projection.mm_embed_dim, projection.rms_norm_eps);
        Self {
            vision_embedder: PatchProjection::new(config, projection, device),
            embed_vision: TextProjection::new(columns, hidden, epsilon, device),
        }
    }
}

/// A model without a tower has no layers, so its pass is complete at its beginning.
impl Vision for ProjectedVision {
    type Pass = Tensor<2>;

    fn begin(&self, patches: &Patches) -> Result<Tensor<2>, Gemma4Error> {
        self.vision_embedder.forward(patches)
    }

    fn advance(&self, pass: &mut Tensor<2>, _layers: usize) -> Option<Tensor<2>> {
        Some(self.embed_vision.forward(pass.clone()))
    }
}

/// The columns and rows of the elements of a grid in reading order.
struct Grid {
    columns: Vec<i32>,
    rows: Vec<i32>,
}

impl Grid {
    /// Creates the grid, whose sides must not exceed the number of `positions` that the model has.
    fn new(columns: usize, rows: usize, positions: usize) -> Result<Self, Gemma4Error> {
        if columns.max(rows) > positions {
            return Err(Gemma4Error::Argument {
                argument: "image",
                reason: format!(
                    "has {columns} x {rows} places, but the model has {positions} positions in each direction; lower the detail, which is the number of soft tokens"
                ),
            });
        }
        let cells = || {
            (0..rows as i32).flat_map(|row| (0..columns as i32).map(move |column| (column, row)))
        };
        Ok(Self {
            columns: cells().map(|(column, _)| column).collect(),
            rows: cells().map(|(_, row)| row).collect(),
        })
    }

    /// Looks up the column in the first table and the row in the second table, each `[positions, channels]`. Returns the
    /// sums, `[columns · rows, channels]`.
    fn embeddings(self, [of_column, of_row]: [Tensor<2>; 2]) -> Tensor<2> {
        let select = |table: Tensor<2>, places: Vec<i32>| {
            let count = places.len();
            let places = TensorData::new(places, [count]);
            let places = Tensor::<1, Int>::from_data(places, (&table.device(), DType::I32));
            table.select(0, places)
        };
        select(of_column, self.columns) + select(of_row, self.rows)
    }
}
