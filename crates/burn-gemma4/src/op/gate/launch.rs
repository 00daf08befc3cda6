//! Launches gates and their gradients.

use super::{
    GateBackend, GateGradients,
    kernel::{gate, gate_gradients},
};
use crate::op::launch::vector_size;
use burn::backend::{cubecl::dtype_to_storage_type, tensor::FloatTensor};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Units of a cube, each of which has one vector.
const UNITS: usize = 256;

/// The vectors of a tensor, how wide they are, and how many cubes have units for them.
fn vectors(tensor: &CubeTensor) -> (u32, usize, usize) {
    let count = tensor.meta.num_elements();
    let vector = vector_size(&tensor.client, tensor.dtype.size(), &[count]);
    let vectors = u32::try_from(count / vector).expect("activations that a device holds");
    (vectors, vector, (vectors as usize).div_ceil(UNITS))
}

impl GateBackend for CubeBackend {
    fn gated(open: FloatTensor<Self>, through: FloatTensor<Self>) -> FloatTensor<Self> {
        let [open, through] = [open, through].map(into_contiguous);
        let client = open.client.clone();
        let output = empty(&open, open.meta.shape().clone(), open.dtype);
        let (vectors, vector, cubes) = vectors(&open);
        // SAFETY: units read and write vectors below `vectors`, which all tensors have.
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
        // SAFETY: as in `gated`.
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
