//! Launches GeGLU and its gradients.

use super::{
    GateBackend, GateColumns, GateColumnsBackend, GateGradients,
    kernel::{GateUpColumnsLaunch, gate, gate_gradients},
};
use crate::op::launch::{rows_of, vector_size};
use burn::backend::{cubecl::dtype_to_storage_type, tensor::FloatTensor};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// The number of units in a cube; each unit handles one vector.
const UNITS: usize = 256;

/// Returns the number of vectors in a tensor, the number of elements per vector, and the number of cubes of a launch
/// with one unit per vector.
fn vectors(tensor: &CubeTensor) -> (u32, usize, usize) {
    let count = tensor.meta.num_elements();
    let vector = vector_size(&tensor.client, tensor.dtype.size(), &[count]);
    let vectors =
        u32::try_from(count / vector).expect("the number of vectors of an activation fits in u32");
    (vectors, vector, (vectors as usize).div_ceil(UNITS))
}

impl GateBackend for CubeBackend {
    fn gated(open: FloatTensor<Self>, through: FloatTensor<Self>) -> FloatTensor<Self> {
        let [open, through] = [open, through].map(into_contiguous);
        let client = open.client.clone();
        let output = empty(&open, open.meta.shape().clone(), open.dtype);
        let (vectors, vector, cubes) = vectors(&open);
        // SAFETY: unit `i` works only if `i` is below `vectors`, the length of all three tensors. The unit reads vector
        // `i` of the gate (`open`) and vector `i` of `through`, and writes vector `i` of `output`.
        unsafe {
            gate::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(UNITS as u32),
                address_type([&open]),
                open.clone().into_tensor_arg(),
                through.into_tensor_arg(),
                output.clone().into_tensor_arg(),
                vectors,
                vectors,
                GateUpColumnsLaunch::new(0, 0),
                GateUpColumnsLaunch::new(0, 0),
                dtype_to_storage_type(open.dtype),
                vector,
            );
        }
        output
    }

    fn gate_gradients(
        open: FloatTensor<Self>,
        through: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
    ) -> GateGradients<Self> {
        let [open, through, gradient] = [open, through, gradient].map(into_contiguous);
        let client = open.client.clone();
        let [of_open, of_through] =
            [(); 2].map(|()| empty(&open, open.meta.shape().clone(), open.dtype));
        let (vectors, vector, cubes) = vectors(&open);
        // SAFETY: unit `i` works only if `i` is below `vectors`, the length of all five tensors. The unit reads vector
        // `i` of the three inputs, and writes vector `i` of both gradients.
        unsafe {
            gate_gradients::launch_unchecked(
                &client,
                cube_count(&client, cubes),
                CubeDim::new_1d(UNITS as u32),
                address_type([&open]),
                open.clone().into_tensor_arg(),
                through.into_tensor_arg(),
                gradient.into_tensor_arg(),
                of_open.clone().into_tensor_arg(),
                of_through.clone().into_tensor_arg(),
                vectors,
                dtype_to_storage_type(open.dtype),
                vector,
            );
        }
        GateGradients {
            gate: of_open,
            through: of_through,
        }
    }
}

impl GateColumnsBackend for CubeBackend {
    fn gated_columns(
        open: FloatTensor<Self>,
        through: FloatTensor<Self>,
        columns: GateColumns,
    ) -> FloatTensor<Self> {
        let [open, through] = [open, through].map(rows_of);
        let client = open.client.clone();
        let GateColumns {
            gate: gate_start,
            through: through_start,
            count,
        } = columns;
        let rows = open.meta.shape()[0];
        assert!(
            gate_start + count <= open.meta.shape()[1]
                && through_start + count <= through.meta.shape()[1]
                && rows == through.meta.shape()[0],
            "columns: the range exceeds the gate or `through`, or their rows differ"
        );
        let output = empty(&open, [rows, count], open.dtype);
        let (gate_stride, through_stride) = (open.meta.strides()[0], through.meta.strides()[0]);
        let multiples = [
            count,
            gate_start,
            through_start,
            gate_stride,
            through_stride,
        ];
        let vector = vector_size(&client, open.dtype.size(), &multiples);
        let vectors = rows * count / vector;
        let in_vectors = |start, stride| {
            GateUpColumnsLaunch::new((start / vector) as u32, (stride / vector) as u32)
        };
        // SAFETY: unit `i` works only if `i` is below `vectors`, the length of `output`. The unit writes vector `i` of
        // `output`. The unit reads one vector of the gate (`open`) and one vector of `through`. Both vectors lie in a
        // row below `rows`, within the range of `count` columns that the GeGLU uses.
        unsafe {
            gate::launch_unchecked(
                &client,
                cube_count(&client, vectors.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                address_type([&open, &through]),
                open.clone().into_tensor_arg(),
                through.into_tensor_arg(),
                output.clone().into_tensor_arg(),
                u32::try_from(vectors).expect("the number of vectors of an activation fits in u32"),
                (count / vector) as u32,
                in_vectors(gate_start, gate_stride),
                in_vectors(through_start, through_stride),
                dtype_to_storage_type(open.dtype),
                vector,
            );
        }
        output
    }
}
