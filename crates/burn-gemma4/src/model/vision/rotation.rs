//! The axial rotary embedding of a vision tower. The first half of a head is rotated by the patch's column, and the
//! second half by its row.

use super::Grid;
use burn::tensor::{DType, Device, Tensor, TensorData};

/// The cosines and sines of the patches' angles, `[patches, 1, 2, 1, head_dim / 4]`. The third dimension has one element
/// for the column and one for the row.
#[derive(Clone, Debug)]
pub(super) struct AxialRotation {
    cos: Tensor<5>,
    sin: Tensor<5>,
}

impl AxialRotation {
    /// Computes the angles on the host in f32, in the order of operations of Hugging Face Transformers.
    pub fn new(grid: &Grid, theta: f64, head_dim: usize, dtype: DType, device: &Device) -> Self {
        let spatial = head_dim / 2;
        let frequencies: Vec<f32> = (0..spatial)
            .step_by(2)
            .map(|channel| 1.0 / (theta as f32).powf(channel as f32 / spatial as f32))
            .collect();
        let places = grid.columns.iter().zip(&grid.rows);
        let angles: Vec<f32> = places
            .flat_map(|(column, row)| [*column, *row])
            .flat_map(|place| frequencies.iter().map(move |one| place as f32 * one))
            .collect();
        let shape = [grid.rows.len(), 1, 2, 1, frequencies.len()];
        let table = |of_angle: fn(f32) -> f32| {
            let values: Vec<f32> = angles.iter().map(|angle| of_angle(*angle)).collect();
            Tensor::from_data(TensorData::new(values, shape), (device, dtype))
        };
        Self {
            cos: table(f32::cos),
            sin: table(f32::sin),
        }
    }

    /// Rotates heads, `[patches, heads, head_dim]`. In each half of a head, the channels `j` and `j + head_dim / 4` form
    /// a pair.
    pub fn rotated(&self, heads: Tensor<3>) -> Tensor<3> {
        let [patches, count, head_dim] = heads.dims();
        let pairs = heads.reshape([patches, count, 2, 2, head_dim / 4]);
        let first = pairs.clone().narrow(3, 0, 1);
        let second = pairs.narrow(3, 1, 1);
        let (cos, sin) = (&self.cos, &self.sin);
        let rotated = Tensor::cat(
            vec![
                first.clone() * cos.clone() - second.clone() * sin.clone(),
                second * cos.clone() + first * sin.clone(),
            ],
            3,
        );
        rotated.reshape([patches, count, head_dim])
    }
}
