//! Builds a tensor from tiles. Tiles that cover the same part of the tensor are added, and the sums are concatenated.

use crate::reference::tensors::{cast, float_dtype};
use burn::backend::{
    Backend,
    tensor::{Device, FloatTensor},
};
use burn::tensor::{DType, Shape};
use std::ops::Range;

/// A four-dimensional tensor whose dimensions are cut into ranges. A tile is the part of the tensor in one range of
/// each dimension.
pub(super) struct Grid<B: Backend> {
    cuts: [Vec<Range<usize>>; 4],
    /// The tiles in row-major order. A tile to which nothing was added is `None` and counts as zeros.
    tiles: Vec<Option<FloatTensor<B>>>,
}

impl<B: Backend> Grid<B> {
    /// Returns a tensor of zeros with the given ranges.
    pub fn new(cuts: [&[Range<usize>]; 4]) -> Self {
        let count = cuts.iter().map(|cuts| cuts.len()).product();
        Self {
            cuts: cuts.map(<[_]>::to_vec),
            tiles: (0..count).map(|_| None).collect(),
        }
    }

    /// Adds `addend` to the tile at `place`, which holds the index of a range for each dimension. In a dimension with
    /// only one range, the index is ignored.
    pub fn add(&mut self, place: [usize; 4], addend: FloatTensor<B>) {
        let index = (0..4).fold(0, |index, dim| match self.cuts[dim].len() {
            1 => index,
            count => index * count + place[dim],
        });
        let tile = &mut self.tiles[index];
        *tile = Some(match tile.take() {
            Some(sum) => B::float_add(sum, addend),
            None => addend,
        });
    }

    /// Returns the whole tensor in `dtype`.
    pub fn join(self, dtype: DType, device: &Device<B>) -> FloatTensor<B> {
        let cuts = self.cuts;
        let mut tiles = self.tiles.into_iter();
        let joined = |dim: usize, mut parts: Vec<FloatTensor<B>>| match parts.len() {
            1 => parts.remove(0),
            _ => B::float_cat(parts, dim),
        };
        let mut tile =
            |a: &Range<usize>, b: &Range<usize>, c: &Range<usize>, d: &Range<usize>| match tiles
                .next()
                .flatten()
            {
                Some(tile) => cast::<B>(tile, dtype),
                None => {
                    let shape = Shape::new([a.len(), b.len(), c.len(), d.len()]);
                    B::float_zeros(shape, device, float_dtype(dtype))
                }
            };
        let parts = cuts[0].iter().map(|a| {
            let parts = cuts[1].iter().map(|b| {
                let parts = cuts[2].iter().map(|c| {
                    let parts = cuts[3].iter().map(|d| tile(a, b, c, d));
                    joined(3, parts.collect())
                });
                joined(2, parts.collect())
            });
            joined(1, parts.collect())
        });
        joined(0, parts.collect())
    }
}
