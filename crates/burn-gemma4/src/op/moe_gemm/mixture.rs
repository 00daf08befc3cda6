//! The whole mixture of experts on Hopper's tensor cores, for inference. Each tile holds rows of one expert, and the
//! rows stay in tiles between the two GEMMs. Therefore only the input is copied to tiles, and only the weighted sums
//! are copied back.

use super::padded::{has_legal_sizes, rows_in_order, serves, with_legal_strides};
use super::tiles::ExpertTiles;
use super::{Groups, Matrices, groups};
use crate::op::geglu::{GateColumns, GateColumnsBackend};
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        ops::FloatTensorOps,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Tensor},
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};
use cube_kit::hopper::gemm::grouped_rows;

/// Runs each row's chosen experts, and adds up their outputs, weighted by `weights`. Returns `None` if the tensor core
/// kernels do not support the device, the dtype or the sizes, or if the device tracks gradients.
///
/// # Shapes
/// - `input` and the result: `[rows, hidden]`, with at least one row.
/// - `gate_up`: `[experts, 2 · inner, hidden]`, with the rows of the gate first.
/// - `down`: `[experts, hidden, inner]`.
/// - `chosen` and `weights`: `[rows, top_k]`. The weights are in f32.
pub(crate) fn mixture(
    input: &Tensor<2>,
    [gate_up, down]: [Matrices; 2],
    chosen: &Tensor<2, Int>,
    weights: &Tensor<2>,
) -> Option<Tensor<2>> {
    let (device, dtype) = (input.device(), input.dtype());
    if device.is_autodiff() || !serves(&device, dtype) {
        return None;
    }
    let [gate_up, down] = [gate_up, down].map(|matrices| matrices.whole(dtype));
    let [experts, hidden, inner] = down.dims();
    if gate_up.dtype() != dtype || down.dtype() != dtype || !has_legal_sizes(&[hidden, inner]) {
        return None;
    }
    let Groups { order, starts } = groups(chosen, experts);
    let mixed = Dispatch::mixture(
        input.clone().into_dispatch(),
        gate_up.into_dispatch(),
        down.into_dispatch(),
        order.into_dispatch(),
        starts.into_dispatch(),
        weights.clone().cast(DType::F32).into_dispatch(),
    );
    Some(Tensor::from_dispatch(mixed))
}

/// The mixture of experts as an operator of a backend.
#[backend_extension(Cube, Fusion)]
pub trait MixtureBackend: Backend {
    /// See [`mixture()`]. `order` and `starts` are the fields of [`Groups`].
    #[fusion(meta = |input, _gate_up, _down, _order, _starts, _weights| input.clone())]
    fn mixture(
        input: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl MixtureBackend for CubeBackend {
    fn mixture(
        input: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        order: IntTensor<Self>,
        starts: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let tiles = ExpertTiles::new(&order, &starts);
        let top_k = weights.meta.shape()[1];
        let multiply = |slots: CubeTensor, matrices: CubeTensor| {
            let matrices = Self::float_swap_dims(with_legal_strides(&matrices), 1, 2);
            grouped_rows(&slots, &matrices, &tiles.table)
                .expect("the device, the dtype and the sizes are served")
        };
        let inner = multiply(tiles.to_slots(&rows_in_order(&input), top_k), gate_up);
        let count = inner.meta.shape()[1] / 2;
        let columns = GateColumns {
            gate: 0,
            through: count,
            count,
        };
        let outputs = multiply(Self::gated_columns(inner.clone(), inner, columns), down);
        tiles.weighted_sums(&outputs, weights)
    }
}
