//! A mask mod that hides the keys of other documents.

use crate::math::score_mod::{MaskMod, ScorePlace, ScoreTable};
use burn::backend::{Dispatch, ops::IntTensorOps};
use burn::tensor::{DType, FloatDType, Int, Tensor};
#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// Hides the keys of other documents, in self-attention over packed documents. The table is [`SameDocument::table`].
///
/// [`segments`](crate::AttentionOptions::segments) hides the same keys and also skips blocks. This type is an example for
/// rules that segments cannot express.
pub struct SameDocument;

#[cfg_attr(feature = "cube", cube)]
impl MaskMod for SameDocument {
    fn visible(place: ScorePlace, table: &ScoreTable) -> bool {
        // The table begins with the number of tokens per sequence.
        let first = 1u32 + place.batch * table.at(0u32) as u32;
        table.at(first + place.query as u32) == table.at(first + place.key as u32)
    }
}

impl SameDocument {
    /// Returns the table, which holds the document ids of all tokens. Ids must be below 2²⁴ in magnitude, so that f32
    /// represents them.
    ///
    /// # Shapes
    /// `documents [batch, len]`.
    pub fn table(documents: Tensor<2, Int>) -> Tensor<1> {
        let [batch, len] = documents.dims();
        let place = (&documents.device().without_autodiff(), DType::F32);
        let count = Tensor::<1>::full([1], len as f64, place);
        let ids = documents.without_autodiff().reshape([batch * len]);
        let ids = Tensor::from_dispatch(Dispatch::int_into_float(
            ids.into_dispatch(),
            FloatDType::F32,
        ));
        Tensor::cat(vec![count, ids], 0)
    }
}
