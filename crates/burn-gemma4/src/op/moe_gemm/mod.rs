//! MoE GEMMs, which multiply each row by the matrices of its chosen experts.
//!
//! The device sorts the (row, chosen expert) pairs by expert. One launch then multiplies the rows of all experts, and
//! reads and writes the rows through the sorted list of pairs.
//!
//! A place is the index of a pair. The place of a row's `rank`-th chosen expert is `row · top_k + rank`.

mod autodiff;
mod group;
mod kernel;
mod launch;
#[cfg(feature = "cuda")]
mod mixture;
#[cfg(feature = "cuda")]
mod padded;
#[cfg(all(test, feature = "flex"))]
mod tests;
#[cfg(any(feature = "cuda", all(test, feature = "wgpu")))]
mod tiles;
#[cfg(any(feature = "cuda", all(test, feature = "wgpu")))]
mod tiles_kernel;

#[cfg(feature = "cuda")]
pub(crate) use mixture::mixture;

use super::linear::{Matrices, QuantizedMatrix};
use crate::quant::layout::Layout;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Device, Int, Shape, Tensor},
};

/// True if the kernels of this module should multiply the rows of `input`. On NVIDIA GPUs with tensor cores before
/// Hopper, inference uses one GEMM per expert instead, which is faster. Training uses the kernels of this module,
/// because the weight gradient of each separate GEMM would have the size of all experts' weights.
pub(crate) fn serves(input: &Tensor<2>) -> bool {
    let (device, dtype) = (input.device(), input.dtype());
    crate::op::runs(&device, dtype) && (device.is_autodiff() || infers_on_device(&device, dtype))
}

/// True if inference in `dtype` uses the kernels of this module. The host then need not wait for the router's choice.
pub(crate) fn infers_on_device(device: &Device, dtype: DType) -> bool {
    #[cfg(feature = "cuda")]
    if super::linear::on_tensor_cores(device, dtype) {
        return padded::serves(device, dtype);
    }
    crate::op::runs(device, dtype)
}

/// The (row, chosen expert) pairs grouped by expert, as constants that autodiff does not track.
pub(crate) struct Groups {
    /// The indices of all (row, chosen expert) pairs sorted by expert, one index per pair. The indices of one expert's
    /// pairs are in ascending order.
    order: Tensor<1, Int>,
    /// The index in `order` of each expert's first pair, `[experts + 1]`. The last element is the number of pairs.
    starts: Tensor<1, Int>,
}

/// Groups the (row, chosen expert) pairs by expert. `chosen` is `[rows, top_k]`.
pub(crate) fn groups(chosen: &Tensor<2, Int>, experts: usize) -> Groups {
    let chosen = chosen.clone().without_autodiff().cast(NUMBERS);
    let result: Grouped<Dispatch> = Dispatch::group(chosen.into_dispatch(), experts);
    Groups {
        order: Tensor::from_dispatch(result.order),
        starts: Tensor::from_dispatch(result.starts),
    }
}

/// Multiplies the input row of each (row, chosen expert) pair by the transpose of the expert's matrix. A place is the
/// index of a pair.
///
/// # Shapes
/// - `input`: `[places / of_row, columns in]`. Every `of_row` consecutive places share an input row.
/// - `weight`: `[experts, columns out, columns in]`, in floats or quantized.
/// - output: `[places, columns out]`.
pub(crate) fn rows(
    input: Tensor<2>,
    weight: Matrices,
    groups: &Groups,
    of_row: usize,
) -> Tensor<2> {
    let input = input.into_dispatch();
    let order = groups.order.clone().into_dispatch();
    let starts = groups.starts.clone().into_dispatch();
    Tensor::from_dispatch(match weight {
        Matrices::Whole(weight) => {
            Dispatch::grouped_rows(input, weight.into_dispatch(), order, starts, of_row)
        }
        Matrices::Quantized { all, rows } => {
            let QuantizedMatrix { words, layout } = all;
            let words = words.without_autodiff().into_dispatch();
            let quantized = Stacked { layout, rows };
            Dispatch::grouped_rows_words(input, words, order, starts, quantized, of_row)
        }
    })
}

/// The layout of the experts' quantized matrices. The rows of all matrices are stacked.
#[derive(Clone, Copy, Debug)]
pub struct Stacked {
    layout: Layout,
    /// The number of rows in one matrix.
    rows: usize,
}

/// The (row, chosen expert) pairs grouped by expert: see [`Groups`].
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Grouped<B: Backend> {
    pub order: IntTensor<B>,
    pub starts: IntTensor<B>,
}

/// The dtype of the indices and offsets in [`Groups`].
const NUMBERS: DType = DType::I32;

fn group_metadata(chosen: &TensorSpec, experts: usize) -> GroupedMetadata {
    let places = chosen.shape[0] * chosen.shape[1];
    GroupedMetadata {
        order: TensorSpec::new(Shape::new([places]), NUMBERS),
        starts: TensorSpec::new(Shape::new([experts + 1]), NUMBERS),
    }
}

fn metadata(input: &TensorSpec, order: &TensorSpec, columns: usize) -> TensorSpec {
    TensorSpec::new(Shape::new([order.shape[0], columns]), input.dtype)
}

/// The grouping of (row, chosen expert) pairs by expert, as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait GroupBackend: Backend {
    /// See [`groups`].
    #[fusion(meta = |chosen, experts| group_metadata(chosen, *experts))]
    fn group(chosen: IntTensor<Self>, experts: usize) -> Grouped<Self>;
}

/// The MoE GEMMs as operators of a backend, forward and backward.
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait GroupedBackend: Backend {
    /// See [`rows`]. The weight is `[experts, columns out, columns in]`.
    #[fusion(meta = |input, weight, order, _starts, _of_row| metadata(input, order, weight.shape[1]))]
    fn grouped_rows(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        of_row: usize,
    ) -> FloatTensor<Self>;

    /// See [`rows`]. The weight is quantized.
    #[fusion(meta = |input, _words, order, _starts, weight, _of_row| {
        metadata(input, order, weight.rows)
    })]
    fn grouped_rows_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        weight: Stacked,
        of_row: usize,
    ) -> FloatTensor<Self>;

    /// Returns the gradient with respect to the input of each (row, chosen expert) pair, `[pairs, columns in]`.
    #[fusion(meta = |gradient, weight, order, _starts| metadata(gradient, order, weight.shape[2]))]
    fn grouped_columns(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Returns the gradient with respect to the input of each (row, chosen expert) pair, for a quantized weight.
    #[fusion(meta = |gradient, _words, order, _starts, weight| {
        metadata(gradient, order, weight.layout.columns)
    })]
    fn grouped_columns_words(
        gradient: FloatTensor<Self>,
        words: IntTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        weight: Stacked,
    ) -> FloatTensor<Self>;

    /// Returns the weight's gradient, `[experts, columns out, columns in]`. The gradient is zero for experts that no
    /// row has chosen.
    #[fusion(meta = |gradient, input, _order, starts, _of_row| {
        let experts = starts.shape[0] - 1;
        let shape = [experts, gradient.shape[1], input.shape[1]];
        TensorSpec::new(Shape::new(shape), gradient.dtype)
    })]
    fn grouped_weight(
        gradient: FloatTensor<Self>,
        input: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        of_row: usize,
    ) -> FloatTensor<Self>;
}
