//! Argmax: the most likely token of each row of logits.

#[cfg(feature = "cube")]
pub(super) mod kernel;
#[cfg(feature = "cube")]
pub(super) mod launch;

use burn::tensor::{Int, Tensor};
#[cfg(feature = "cube")]
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape},
};

/// Returns, for each row of `[rows, columns]`, the first column of the largest value, `[rows]`. NaN counts as −∞. The
/// column is −1 for a row of only −∞ and NaN.
pub(crate) fn argmax(logits: Tensor<2>) -> Tensor<1, Int> {
    #[cfg(feature = "cube")]
    if super::serve(&logits) {
        return Tensor::from_dispatch(Dispatch::argmax(logits.into_dispatch()));
    }
    let nothing = f32::NEG_INFINITY;
    let numbers = logits.clone().mask_fill(logits.is_nan(), nothing);
    let (largest, columns) = numbers.max_dim_with_indices(1);
    columns
        .mask_fill(largest.equal_elem(nothing), -1)
        .squeeze_dim(1)
}

/// The dtype of token ids.
#[cfg(feature = "cube")]
const NUMBERS: DType = DType::I32;

/// The backend operator that runs the kernels.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub trait ArgmaxBackend: Backend {
    /// See [`argmax`].
    #[fusion(meta = |logits| TensorSpec::new(Shape::new([logits.shape[0]]), NUMBERS))]
    fn argmax(logits: FloatTensor<Self>) -> IntTensor<Self>;
}
