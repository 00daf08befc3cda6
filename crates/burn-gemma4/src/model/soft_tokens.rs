//! Soft tokens: rows that stand in the place of token embeddings, such as those of an image.

use burn::tensor::{Int, Tensor};
use std::ops::Range;

/// The soft tokens of an image or an audio clip in a call of the model.
#[derive(Clone, Debug)]
pub(crate) struct SoftTokens {
    /// The index of the sequence.
    pub sequence: usize,
    /// The columns of the call in which the soft tokens stand.
    pub columns: Range<usize>,
    /// The soft tokens, `[columns, hidden]`.
    pub rows: Tensor<2>,
    /// True if the soft tokens see each other in both directions in sliding layers.
    pub is_bidirectional: bool,
}

/// The soft tokens of a training batch, in tensors of the batch's shape. Batches with other images have tensors of the
/// same shapes, so that a captured graph can read them.
#[derive(Clone, Debug)]
pub(crate) struct SoftTokenGrid {
    /// A row for each column of the call, `[batch, columns, hidden]`. The rows outside of images and clips are not
    /// read.
    pub rows: Tensor<3>,
    /// 1 in the columns of images and clips, and 0 in all others, `[batch, columns]`.
    pub is_soft: Tensor<2, Int>,
}

/// The images and audio clips in a call of the model.
#[derive(Clone, Debug)]
pub(crate) enum CallMedia {
    /// Each image and each clip of a prompt. The list is empty in most calls.
    Each(Vec<SoftTokens>),
    /// The images and clips of a training batch.
    Grid(Box<SoftTokenGrid>),
}

impl Default for CallMedia {
    fn default() -> Self {
        Self::Each(Vec::new())
    }
}

impl CallMedia {
    /// Puts the soft tokens in the place of token embeddings, `[batch, columns, hidden]`.
    pub fn placed(&self, mut embedded: Tensor<3>) -> Tensor<3> {
        let [_, _, hidden] = embedded.dims();
        let each = match self {
            Self::Each(each) => each,
            Self::Grid(grid) => {
                let is_soft = grid.is_soft.clone().greater_elem(0).unsqueeze_dim(2);
                return embedded.mask_where(is_soft, grid.rows.clone());
            }
        };
        for SoftTokens {
            sequence,
            columns,
            rows,
            ..
        } in each
        {
            let place = [*sequence..sequence + 1, columns.clone(), 0..hidden];
            let rows = rows.clone().cast(embedded.dtype()).unsqueeze::<3>();
            embedded = embedded.slice_assign(place, rows);
        }
        embedded
    }

    /// Makes the rows of a training batch, `[batch · columns, width]`, constants in the places of soft tokens. The
    /// tokens there only stand for an image or a clip, so that no gradient may reach their table.
    pub fn constant_rows(&self, rows: Tensor<2>) -> Tensor<2> {
        match self {
            Self::Grid(grid) if rows.is_tracked() => {
                let [batch, columns] = grid.is_soft.dims();
                let is_soft = grid.is_soft.clone().reshape([batch * columns, 1]);
                let constant = rows.clone().detach();
                rows.mask_where(is_soft.greater_elem(0), constant)
            }
            _ => rows,
        }
    }

    /// Returns the rows of soft tokens of a training batch, if they are a leaf of the autodiff graph.
    pub fn leaf(&self) -> Option<&Tensor<3>> {
        match self {
            Self::Grid(grid) => Some(&grid.rows).filter(|rows| rows.is_require_grad()),
            Self::Each(_) => None,
        }
    }

    /// Returns the media of a training batch as constants.
    pub fn without_autodiff(&self) -> Self {
        match self {
            Self::Grid(grid) => Self::Grid(Box::new(SoftTokenGrid {
                rows: grid.rows.clone().inner(),
                is_soft: grid.is_soft.clone(),
            })),
            Self::Each(_) => self.clone(),
        }
    }

    /// Returns the sequence and the columns of each image and each clip of a prompt.
    pub fn places(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let each = self.each().iter();
        each.map(|one| (one.sequence, one.columns.clone()))
    }

    /// Returns the columns of the image that contains `column` of a sequence, if the image's soft tokens see each other in
    /// both directions.
    pub fn block(&self, sequence: usize, column: usize) -> Option<Range<usize>> {
        let mut blocks = self.each().iter().filter(|one| one.is_bidirectional);
        let block = blocks.find(|one| one.sequence == sequence && one.columns.contains(&column));
        block.map(|block| block.columns.clone())
    }

    /// True if the soft tokens of some image see each other in both directions.
    pub fn has_blocks(&self) -> bool {
        let mut blocks = self.each().iter().filter(|one| one.is_bidirectional);
        blocks.any(|block| block.columns.len() > 1)
    }

    fn each(&self) -> &[SoftTokens] {
        match self {
            Self::Each(each) => each,
            Self::Grid(_) => &[],
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;

    /// Rows outside of images and clips are not read: they may be NaN.
    #[test]
    fn placed_rows_of_grid_read_only_soft_tokens() {
        let device = Device::flex().autodiff();
        let rows = Tensor::<3>::from_data([[[f32::NAN], [5.0], [f32::NAN]]], &device);
        let rows = rows.require_grad();
        let embedded = Tensor::<3>::from_data([[[1.0], [2.0], [3.0]]], &device).require_grad();
        let media = CallMedia::Grid(Box::new(SoftTokenGrid {
            rows: rows.clone(),
            is_soft: Tensor::from_data([[0, 1, 0]], &device),
        }));
        let placed = media.placed(embedded.clone());
        let values = |tensor: Tensor<3>| tensor.into_data().iter::<f32>().collect::<Vec<_>>();
        assert_eq!(values(placed.clone()), [1.0, 5.0, 3.0]);
        let gradients = (placed * 2.0).sum().backward();
        let of = |leaf: &Tensor<3>| values(leaf.grad(&gradients).expect("a leaf has a gradient"));
        assert_eq!(of(&rows), [0.0, 2.0, 0.0]);
        assert_eq!(of(&embedded), [2.0, 0.0, 2.0]);
    }
}
