//! Concatenates the attention outputs of all heads for the output projection, in one launch. Inference on CubeCL
//! devices uses this operator.

mod kernel;
#[cfg(test)]
mod tests;

use super::launch::{rows_of, vector_size};
use burn::{
    backend::{
        Backend, Dispatch, backend_extension, cubecl::dtype_to_storage_type,
        fusion::custom::TensorSpec, tensor::FloatTensor,
    },
    tensor::{Shape, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl};
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;
use kernel::{HeadsLaunch, UNITS, rows_of_heads_pdl};

/// Permutes `[sequences, heads, positions, channels]` to `[sequences · positions, heads · channels]`.
pub(crate) fn rows_of_heads(heads: Tensor<4>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::rows_of_heads(heads.into_dispatch()))
}

/// The backend operator that runs the kernel.
#[backend_extension(Cube, Fusion)]
pub trait RowsOfHeadsBackend: Backend {
    /// See [`rows_of_heads`].
    #[fusion(meta = metadata)]
    fn rows_of_heads(heads: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Returns the shape and dtype of the output, which Burn's fusion needs before it runs the operator.
fn metadata(heads: &TensorSpec) -> TensorSpec {
    let [sequences, count, positions, channels] = [0, 1, 2, 3].map(|dim| heads.shape[dim]);
    let shape = Shape::new([sequences * positions, count * channels]);
    TensorSpec::new(shape, heads.dtype)
}

impl RowsOfHeadsBackend for CubeBackend {
    fn rows_of_heads(heads: FloatTensor<Self>) -> FloatTensor<Self> {
        let client = heads.client.clone();
        let heads = rows_of(heads);
        let [sequences, count, positions, channels] = heads.meta.shape().dims();
        let strides = heads.meta.strides();
        let strides = [strides[0], strides[1], strides[2]];
        let [of_sequence, of_head, of_position] = strides;
        let multiples = [channels, of_sequence, of_head, of_position];
        let vector = vector_size(&client, heads.dtype.size(), &multiples);
        let shape = [sequences * positions, count * channels];
        let output = empty(&heads, shape, heads.dtype);
        let all = sequences * positions * count * channels / vector;
        let [of_sequence, of_head, of_position] = strides.map(|stride| (stride / vector) as u32);
        let sizes = HeadsLaunch::new(
            count as u32,
            positions as u32,
            (channels / vector) as u32,
            of_sequence,
            of_head,
            of_position,
            all as u32,
        );
        let element = dtype_to_storage_type(heads.dtype);
        // SAFETY: unit `i` works only if `i` is below `all`, the number of vectors in both tensors. The unit reads one
        // vector of `heads`, whose channels are contiguous, and writes vector `i` of `output`.
        unsafe {
            rows_of_heads_pdl::launch_unchecked(
                &client,
                cube_count(&client, all.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                address_type([&heads, &output]),
                heads.into_tensor_arg(),
                output.clone().into_tensor_arg(),
                sizes,
                supports_pdl(&client),
                element,
                vector,
            );
        }
        output
    }
}
