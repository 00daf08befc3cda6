//! Products of a few rows, bound by the memory's rate, for inference on CubeCL devices.

mod experts;
mod kernel;
mod launch;
mod sums;
mod words;

use super::{Matrices, Matrix};
use crate::quantized::layout::Layout;
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Shape, Tensor},
};

/// Rows that a product takes at most.
pub(crate) const MOST_ROWS: usize = 8;

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn project(input: Tensor<2>, weight: Matrix, cap: Option<f64>) -> Tensor<2> {
    let input = input.into_dispatch();
    Tensor::from_dispatch(match weight {
        Matrix::Whole(weight) => Dispatch::project(input, weight.into_dispatch(), cap),
        Matrix::Quantized(weight) => {
            let (words, layout) = (weight.words.into_dispatch(), weight.layout);
            Dispatch::project_words(input, words, layout, cap)
        }
    })
}

/// `gelu(input · gateᵀ) · (input · throughᵀ)`.
pub(crate) fn project_gated(input: Tensor<2>, gate: Matrix, through: Matrix) -> Tensor<2> {
    let dispatched = input.clone().into_dispatch();
    Tensor::from_dispatch(match (gate, through) {
        (Matrix::Whole(gate), Matrix::Whole(through)) => {
            Dispatch::project_gated(dispatched, gate.into_dispatch(), through.into_dispatch())
        }
        (Matrix::Quantized(gate), Matrix::Quantized(through)) if gate.layout == through.layout => {
            let (words, through) = (gate.words.into_dispatch(), through.words.into_dispatch());
            Dispatch::project_words_gated(dispatched, words, through, gate.layout)
        }
        // Files of mixed formats.
        (gate, through) => {
            let through = project(input.clone(), through, None);
            return project_gate_of(input, gate, through, 0);
        }
    })
}

/// `gelu(input · gateᵀ)` times the columns of `[rows, …]` from `start` on.
pub(crate) fn project_gate_of(
    input: Tensor<2>,
    gate: Matrix,
    through: Tensor<2>,
    start: usize,
) -> Tensor<2> {
    let (input, through) = (input.into_dispatch(), through.into_dispatch());
    Tensor::from_dispatch(match gate {
        Matrix::Whole(gate) => {
            Dispatch::project_gate_of(input, gate.into_dispatch(), through, start)
        }
        Matrix::Quantized(gate) => {
            let (words, layout) = (gate.words.into_dispatch(), gate.layout);
            Dispatch::project_words_gate_of(input, words, through, layout, start)
        }
    })
}

/// `gelu(x · gateᵀ) · (x · throughᵀ)` of each row by each of its experts, `chosen`, `[rows, top_k]`: `[rows · top_k, columns]`. A matrix has
/// the rows of the gate and, below them, those of what goes through.
pub(crate) fn gate_experts(
    input: Tensor<2>,
    weight: Matrices,
    chosen: Tensor<2, Int>,
) -> Tensor<2> {
    let (input, chosen) = (input.into_dispatch(), chosen.into_dispatch());
    Tensor::from_dispatch(match weight {
        Matrices::Whole(weight) => Dispatch::gate_experts(input, weight.into_dispatch(), chosen),
        Matrices::Quantized { all, rows } => {
            let (words, layout) = (all.words.into_dispatch(), all.layout);
            Dispatch::gate_experts_words(input, words, chosen, layout, rows)
        }
    })
}

/// The sums of what each row's experts make of its inner ones, `[rows · top_k, inner]`, times their `shares`, `[rows, top_k]` in f32:
/// `[rows, columns]`.
pub(crate) fn mix_experts(
    input: Tensor<2>,
    weight: Matrices,
    chosen: Tensor<2, Int>,
    shares: Tensor<2>,
) -> Tensor<2> {
    let (input, chosen) = (input.into_dispatch(), chosen.into_dispatch());
    let shares = shares.into_dispatch();
    Tensor::from_dispatch(match weight {
        Matrices::Whole(weight) => {
            Dispatch::mix_experts(input, weight.into_dispatch(), chosen, shares)
        }
        Matrices::Quantized { all, rows } => {
            let (words, layout) = (all.words.into_dispatch(), all.layout);
            Dispatch::mix_experts_words(input, words, chosen, shares, layout, rows)
        }
    })
}

/// The kernels as operators of a backend. The functions above say what they compute; weights are numbers, or the words of quantized rows.
#[backend_extension(Cube, Fusion)]
pub trait FewRowsBackend: Backend {
    #[fusion(meta = |input, weight, _cap| metadata(input, weight))]
    fn project(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        cap: Option<f64>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, gate, _through| metadata(input, gate))]
    fn project_gated(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, gate, _through, _start| metadata(input, gate))]
    fn project_gate_of(
        input: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        through: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, words, _layout, _cap| metadata(input, words))]
    fn project_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
        cap: Option<f64>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, words, _through, _layout| metadata(input, words))]
    fn project_words_gated(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        through: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, words, _through, _layout, _start| metadata(input, words))]
    fn project_words_gate_of(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        through: FloatTensor<Self>,
        layout: Layout,
        start: usize,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, weight, chosen| gated_metadata(input, chosen, weight.shape[1]))]
    fn gate_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, weight, chosen, _shares| mixed_metadata(input, chosen, weight.shape[1]))]
    fn mix_experts(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, _words, chosen, _layout, rows| gated_metadata(input, chosen, *rows))]
    fn gate_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |input, _words, chosen, _shares, _layout, rows| {
        mixed_metadata(input, chosen, *rows)
    })]
    fn mix_experts_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        chosen: IntTensor<Self>,
        shares: FloatTensor<Self>,
        layout: Layout,
        rows: usize,
    ) -> FloatTensor<Self>;
}

/// What Burn's fusion must know of a product before it exists.
fn metadata(input: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([input.shape[0], weight.shape[0]]), input.dtype)
}

fn gated_metadata(input: &TensorSpec, chosen: &TensorSpec, rows: usize) -> TensorSpec {
    let items = chosen.shape[0] * chosen.shape[1];
    TensorSpec::new(Shape::new([items, rows / 2]), input.dtype)
}

fn mixed_metadata(input: &TensorSpec, chosen: &TensorSpec, rows: usize) -> TensorSpec {
    TensorSpec::new(Shape::new([chosen.shape[0], rows]), input.dtype)
}
