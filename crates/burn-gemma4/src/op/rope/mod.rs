//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split, some pairs not rotated, and the heads it is for.

#[cfg(feature = "cube")]
pub(crate) mod heads;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
pub(crate) mod tables;

#[cfg(feature = "cube")]
use super::flat_rows;
use crate::model::layer::RmsNorm;
use burn::tensor::Tensor;

/// Cosines and sines of the positions of one call, for one type of layer.
#[derive(Clone, Debug)]
pub struct Rotation {
    /// `[batch or 1, 1, positions, head_dim / 2]`.
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Rotation {
    /// A projection's heads, normalised and rotated: `[batch, positions, heads · head_dim]` to
    /// `[batch, heads, positions, head_dim]`.
    pub fn heads(&self, projected: Tensor<3>, norm: &RmsNorm) -> Tensor<4> {
        let pairs = self.cos.dims()[3];
        #[cfg(feature = "cube")]
        if norm.is_served_with(&projected) {
            let [batch, positions, columns] = projected.dims();
            let tables = RotationTables {
                cos: flat_rows(self.cos.clone()),
                sin: flat_rows(self.sin.clone()),
            };
            let projected = flat_rows(projected);
            let heads =
                heads::heads_in_order(projected, norm.weight.val(), &tables, norm.epsilon());
            let shape = [batch, positions, columns / (2 * pairs), 2 * pairs];
            return heads.reshape(shape).swap_dims(1, 2);
        }
        let heads = split_heads(projected, 2 * pairs);
        self.apply(norm.forward(heads).swap_dims(1, 2))
    }

    /// Rotates `[batch, heads, positions, head_dim]`: channel `j` with channel `j + head_dim / 2`.
    fn apply(&self, input: Tensor<4>) -> Tensor<4> {
        let head_dim = input.dims()[3];
        let first = input.clone().narrow(3, 0, head_dim / 2);
        let second = input.narrow(3, head_dim / 2, head_dim / 2);
        let (cos, sin) = (self.cos.clone(), self.sin.clone());
        Tensor::cat(
            vec![
                first.clone() * cos.clone() - second.clone() * sin.clone(),
                second * cos + first * sin,
            ],
            3,
        )
    }

    /// The rotation of the last `count` positions.
    pub fn last(&self, count: usize) -> Self {
        let positions = self.cos.dims()[2];
        let last = |table: &Tensor<4>| table.clone().narrow(2, positions - count, count);
        Self {
            cos: last(&self.cos),
            sin: last(&self.sin),
        }
    }
}

/// Which positions a call computes.
#[derive(Clone, Debug)]
pub enum Positions {
    /// The same for every sequence: `first .. first + count`.
    Range {
        /// The first position.
        first: usize,
        /// How many.
        count: usize,
    },
    /// A list for each sequence, `[batch][count]`.
    Each(Vec<Vec<usize>>),
}

impl Positions {
    /// One more than the largest position.
    pub(crate) fn end(&self) -> usize {
        match self {
            Self::Range { first, count } => first + count,
            Self::Each(rows) => rows
                .iter()
                .flatten()
                .max()
                .map_or(0, |position| position + 1),
        }
    }
}

/// The rotation by position, `[positions, head_dim / 2]` each.
#[cfg(feature = "cube")]
#[derive(Clone, Debug)]
pub(crate) struct RotationTables {
    pub cos: Tensor<2>,
    pub sin: Tensor<2>,
}

/// `[batch, positions, heads · head_dim]` to `[batch, positions, heads, head_dim]`.
pub(crate) fn split_heads(projected: Tensor<3>, head_dim: usize) -> Tensor<4> {
    let [batch, positions, columns] = projected.dims();
    projected.reshape([batch, positions, columns / head_dim, head_dim])
}
