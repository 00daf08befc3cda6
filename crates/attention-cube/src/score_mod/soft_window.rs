//! A score mod that lowers the scores of keys outside of a window.

use crate::math::score_mod::{ScoreMod, ScorePlace, ScoreTable};
use burn::tensor::{DType, Device, Tensor, TensorData};
#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// Lowers the scores of keys beyond a window, in proportion to the distance from the window. The table is
/// [`SoftWindow::table`].
pub struct SoftWindow;

#[cfg_attr(feature = "cube", cube)]
impl ScoreMod for SoftWindow {
    fn score(score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
        let beyond = place.distance_f32().abs() - table.at(0u32);
        if beyond > 0.0f32 {
            score - table.at(1u32) * beyond
        } else {
            score
        }
    }

    fn derivative(_score: f32, _place: ScorePlace, _table: &ScoreTable) -> f32 {
        1.0f32
    }
}

impl SoftWindow {
    /// Returns the table for a window of `width` positions on each side. Each further position lowers the score by
    /// `falloff`.
    pub fn table(width: usize, falloff: f32, device: &Device) -> Tensor<1> {
        let data = TensorData::from([width as f32, falloff]);
        Tensor::from_data(data, (device, DType::F32))
    }
}
