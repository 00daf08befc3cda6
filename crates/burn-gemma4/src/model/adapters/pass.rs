//! The adapters of one forward pass.

use super::loaded::LoadedAdapter;
use crate::model::layer::Linear;
use crate::op::linear::Matrix;
use burn::module::ParamId;
use burn::tensor::{Bool, Tensor};
use std::collections::HashMap;
use std::sync::Arc;

/// The factors of one adapter, or of several stacked adapters, of one linear projection. The factors are in the model's
/// dtype.
#[derive(Clone, Debug)]
pub(crate) struct Factors {
    /// The rows of each `A`, `[rank, columns in]`.
    pub reads: Tensor<2>,
    /// The columns of each `B · scale`, `[columns out, rank]`.
    pub writes: Tensor<2>,
    /// The index of the mask that hides other adapters from a row, or `None` if all rows use all factors.
    pub mask: Option<usize>,
}

impl Factors {
    pub fn rank(&self) -> usize {
        self.reads.dims()[0]
    }

    pub fn bytes(&self) -> usize {
        let elements = self.reads.shape().num_elements() + self.writes.shape().num_elements();
        elements * self.reads.dtype().size()
    }
}

/// The adapters of the rows in one forward pass.
#[derive(Clone, Debug)]
pub(crate) struct PassAdapters {
    /// The factors by the parameter id of their projection's weight.
    pub(super) factors: Arc<HashMap<ParamId, Factors>>,
    /// The masks of stacked adapters, `[rows, rank]`. An element is true if the column's adapter is not the row's.
    pub(super) masks: Vec<Tensor<2, Bool>>,
}

impl PassAdapters {
    /// Applies one adapter to all rows of a pass.
    pub fn of_all_rows(adapter: &LoadedAdapter) -> Self {
        Self {
            factors: adapter.factors().clone(),
            masks: Vec::new(),
        }
    }

    /// True if an adapter changes the projection.
    pub fn adapts(&self, linear: &Linear) -> bool {
        self.factors.contains_key(&linear.weight.id())
    }

    /// Returns the tensor that the adapters add to the projection of `input`, or `None` if no adapter changes the
    /// projection. `product` multiplies rows by the transpose of a matrix.
    ///
    /// All rows are multiplied by the factors of all stacked adapters. The mask then replaces the inner values of
    /// other adapters by zeros. A multiplication by zeros would not do: an overflow in another adapter's values would
    /// give NaN.
    ///
    /// # Shapes
    /// - `input`: `[rows, columns in]`.
    /// - result: `[rows, columns out]`.
    pub fn added(
        &self,
        input: &Tensor<2>,
        linear: &Linear,
        product: impl Fn(Tensor<2>, Matrix) -> Tensor<2>,
    ) -> Option<Tensor<2>> {
        let factors = self.factors.get(&linear.weight.id())?;
        let inner = product(input.clone(), factors.reads.clone().into());
        let inner = match factors.mask {
            Some(mask) => inner.mask_fill(self.masks[mask].clone(), 0.0),
            None => inner,
        };
        Some(product(inner, factors.writes.clone().into()))
    }
}
