//! Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864) in the half-split form, for the query and key
//! heads of a projection. RoPE may rotate only some of the channel pairs.

#[cfg(feature = "cube")]
pub(crate) mod heads;
#[cfg(feature = "cube")]
mod heads_launch;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
#[cfg(feature = "cube")]
mod layouts;
#[cfg(feature = "cube")]
mod rotate;
pub(crate) mod tables;
#[cfg(all(test, feature = "cube"))]
mod tests;

#[cfg(feature = "cube")]
use super::flat_rows;
use super::norm::{norm, normalize};
use burn::tensor::{Int, Tensor};

/// The cosines and sines of RoPE at the token positions of one call of the model, for one layer type.
#[derive(Clone, Debug)]
pub(crate) struct Rotation {
    /// The cosines, `[batch, 1, positions, head_dim / 2]`, where `batch` is 1 if all sequences have the same positions.
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Rotation {
    /// Computes a projection's heads, normalized with `weight` and rotated. The shape changes from
    /// `[batch · positions, heads · head_dim]` to `[batch, heads, positions, head_dim]`.
    pub fn heads(
        &self,
        projected: Tensor<2>,
        batch: usize,
        weight: Tensor<1>,
        epsilon: f64,
    ) -> Tensor<4> {
        let shape = self.shape(&projected, batch);
        #[cfg(feature = "cube")]
        if super::serve_with(&projected, &weight) {
            let heads = heads::heads_in_order(projected, weight, &self.tables(), epsilon);
            return heads.reshape(shape).swap_dims(1, 2);
        }
        let heads = norm(projected.reshape(shape), weight, epsilon);
        #[cfg(feature = "cube")]
        if super::runs(&heads.device(), heads.dtype()) && heads.dtype() == self.cos.dtype() {
            return rotate::rotated(heads, &self.tables()).swap_dims(1, 2);
        }
        self.apply(heads.swap_dims(1, 2))
    }

    /// Computes a layer's queries, keys and values from column ranges of one projection. Each result is
    /// `[batch, heads, positions, head_dim]`. Returns `None` if the kernels do not support the tensors.
    #[cfg(feature = "cube")]
    pub fn layer_heads(
        &self,
        projected: Tensor<2>,
        [query_weight, key_weight]: [Tensor<1>; 2],
        columns: heads::LayerColumns,
        own: heads::OwnShape,
    ) -> Option<[Tensor<4>; 3]> {
        let serves = [&query_weight, &key_weight]
            .into_iter()
            .all(|weight| super::serve_with(&projected, weight));
        if !serves {
            return None;
        }
        let [_, _, positions, pairs] = self.cos.dims();
        let shape = [
            own.sequences,
            positions,
            columns.count / (2 * pairs),
            2 * pairs,
        ];
        let parts = heads::PartsInOrder {
            projected,
            query_weight,
            key_weight,
            tables: &self.tables(),
        };
        let [queries, keys, values] = heads::layer_heads_in_order(parts, columns, own);
        Some([queries.reshape(shape).swap_dims(1, 2), keys, values])
    }

    /// Returns the cosines and sines in the kernels' layout, `[rows, head_dim / 2]`.
    #[cfg(feature = "cube")]
    fn tables(&self) -> RotationTables {
        RotationTables {
            cos: flat_rows(self.cos.clone()),
            sin: flat_rows(self.sin.clone()),
        }
    }

    /// Computes the heads of values, which are normalized without a weight and not rotated. The shapes of the input and
    /// the result are the same as in [`heads`](Self::heads).
    pub fn value_heads(&self, projected: Tensor<2>, batch: usize, epsilon: f64) -> Tensor<4> {
        let shape = self.shape(&projected, batch);
        normalize(projected.reshape(shape), epsilon).swap_dims(1, 2)
    }

    /// Returns the shape `[batch, positions, heads, head_dim]` of the heads in a projection's output.
    fn shape(&self, projected: &Tensor<2>, batch: usize) -> [usize; 4] {
        let [_, _, positions, pairs] = self.cos.dims();
        let [_, columns] = projected.dims();
        [batch, positions, columns / (2 * pairs), 2 * pairs]
    }

    /// Rotates `[batch, heads, positions, head_dim]`. Channel `j` is paired with channel `j + head_dim / 2`.
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

    /// Returns the cosines and sines, `[batch or 1, 1, positions, head_dim / 2]`.
    #[cfg(feature = "cube")]
    pub fn parts(&self) -> [Tensor<4>; 2] {
        [self.cos.clone(), self.sin.clone()]
    }

    /// Creates a rotation from the tensors that [`parts`](Self::parts) returns.
    #[cfg(feature = "cube")]
    pub fn of_parts([cos, sin]: [Tensor<4>; 2]) -> Self {
        Self { cos, sin }
    }

    /// Returns the number of positions.
    pub fn positions(&self) -> usize {
        self.cos.dims()[2]
    }

    /// Returns the cosines and sines of the positions with these indices.
    pub fn select(&self, indices: &Tensor<1, Int>) -> Self {
        let selected = |table: &Tensor<4>| table.clone().select(2, indices.clone());
        Self {
            cos: selected(&self.cos),
            sin: selected(&self.sin),
        }
    }

    /// Returns the cosines and sines of the last `count` positions.
    pub fn last(&self, count: usize) -> Self {
        let positions = self.positions();
        let last = |table: &Tensor<4>| table.clone().narrow(2, positions - count, count);
        Self {
            cos: last(&self.cos),
            sin: last(&self.sin),
        }
    }
}

/// The positions of the tokens in one call of the model.
#[derive(Clone, Debug)]
pub(crate) enum Positions {
    /// The positions `first .. first + count`, for every sequence.
    Range {
        /// The first position.
        first: usize,
        /// The number of positions.
        count: usize,
    },
    /// A separate list of positions for each sequence, `[batch][count]`.
    Each(Vec<Vec<usize>>),
}

impl Positions {
    /// Returns the largest position plus one.
    pub fn end(&self) -> usize {
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

/// The rotation tables: cosines and sines, `[positions, head_dim / 2]` each.
#[cfg(feature = "cube")]
#[derive(Clone, Debug)]
pub(crate) struct RotationTables {
    pub cos: Tensor<2>,
    pub sin: Tensor<2>,
}
