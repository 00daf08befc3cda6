//! Products of a few rows, bound by the memory's rate, for inference on CubeCL devices.

mod kernel;
mod launch;

use burn::{
    backend::{
        Backend, Dispatch, backend_extension, fusion::custom::TensorSpec, tensor::FloatTensor,
    },
    tensor::{Shape, Tensor},
};

/// Rows that a product takes at most.
pub(crate) const MOST_ROWS: usize = 8;

/// `[rows, columns in]` times the transpose of `[columns out, columns in]`.
pub(crate) fn project(input: Tensor<2>, weight: Tensor<2>, cap: Option<f64>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::project(
        input.into_dispatch(),
        weight.into_dispatch(),
        cap,
    ))
}

/// `gelu(input · gateᵀ) · (input · throughᵀ)`.
pub(crate) fn project_gated(input: Tensor<2>, gate: Tensor<2>, through: Tensor<2>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::project_gated(
        input.into_dispatch(),
        gate.into_dispatch(),
        through.into_dispatch(),
    ))
}

/// `gelu(input · gateᵀ)` times the columns of `[rows, …]` from `start` on.
pub(crate) fn project_gate_of(
    input: Tensor<2>,
    gate: Tensor<2>,
    through: Tensor<2>,
    start: usize,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::project_gate_of(
        input.into_dispatch(),
        gate.into_dispatch(),
        through.into_dispatch(),
        start,
    ))
}

/// The kernel as operators of a backend. The functions above say what they compute.
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
}

/// What Burn's fusion must know of a product before it exists.
fn metadata(input: &TensorSpec, weight: &TensorSpec) -> TensorSpec {
    TensorSpec::new(Shape::new([input.shape[0], weight.shape[0]]), input.dtype)
}
