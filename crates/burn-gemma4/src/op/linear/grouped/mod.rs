//! Products of rows with the matrices of their experts: choices are brought into groups of one expert on the device, and each group's rows
//! multiplied by its matrix, in one launch for all experts.
//!
//! A place is one choice of one row: `row · top_k + rank`. Places keep their order in memory: who belongs together is told by a permutation of
//! their numbers, through which the kernels read and write.

mod autodiff;
mod group;
mod kernel;
mod launch;
#[cfg(all(test, feature = "flex"))]
mod tests;

use super::{Matrices, QuantizedMatrix};
use crate::quantized::layout::Layout;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Shape, Tensor},
};

/// Whether the kernels multiply such rows. Of halves on CUDA they are slower than a product an expert on matrix units, for which the host
/// must know the choice: they serve training, where each such product's gradient would be of the size of all experts.
pub(crate) fn serves(input: &Tensor<2>) -> bool {
    let device = input.device();
    let on_matrix_units = super::has_matrix_units(input) && !device.is_autodiff();
    crate::op::runs(&device, input.dtype()) && !on_matrix_units
}

/// The places of each expert. Constants.
pub(crate) struct Groups {
    /// `[places]`: the places in the order of their experts, those of one in their own order.
    order: Tensor<1, Int>,
    /// `[experts + 1]`: where in it those of each expert begin, and at last how many there are.
    starts: Tensor<1, Int>,
}

/// The groups of a choice that [`choose`](crate::op::route::choose) has made.
pub(crate) fn groups(chosen: &Tensor<2, Int>, experts: usize) -> Groups {
    let chosen = chosen.clone().without_autodiff().cast(NUMBERS);
    let result: Grouped<Dispatch> = Dispatch::group(chosen.into_dispatch(), experts);
    Groups {
        order: Tensor::from_dispatch(result.order),
        starts: Tensor::from_dispatch(result.starts),
    }
}

/// `[places / of_row, columns in]` times the transposes of the places' matrices, `[columns out, columns in]`: `[places, columns out]`.
/// `of_row` places read the same row of the input.
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

/// The quantized matrices of experts, one below the other.
#[derive(Clone, Copy, Debug)]
pub struct Stacked {
    layout: Layout,
    /// Of one matrix.
    rows: usize,
}

/// See [`Groups`].
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Grouped<B: Backend> {
    pub order: IntTensor<B>,
    pub starts: IntTensor<B>,
}

/// The dtype of places' numbers.
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

/// The groups as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait GroupBackend: Backend {
    /// See [`groups`].
    #[fusion(meta = |chosen, experts| group_metadata(chosen, *experts))]
    fn group(chosen: IntTensor<Self>, experts: usize) -> Grouped<Self>;
}

/// The products as operators of a backend, forward and backward.
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait GroupedBackend: Backend {
    /// See [`rows`]; the weight is `[experts, columns out, columns in]`.
    #[fusion(meta = |input, weight, order, _starts, _of_row| metadata(input, order, weight.shape[1]))]
    fn grouped_rows(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        of_row: usize,
    ) -> FloatTensor<Self>;

    /// The same with a quantized weight.
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

    /// The gradient by what each place has read, `[places, columns in]`.
    #[fusion(meta = |gradient, weight, order, _starts| metadata(gradient, order, weight.shape[2]))]
    fn grouped_columns(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// The same with a quantized weight.
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

    /// The gradient by the weight, `[experts, columns out, columns in]`: zeros for an expert without places.
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
