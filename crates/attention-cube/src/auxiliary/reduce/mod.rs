//! Launches the kernels that add up partial gradients.

mod kernel;

#[cfg(feature = "cuda")]
use self::kernel::UNITS;
use crate::kernel_args::tensor_arg;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::{cubecl, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Adds up the `parts` partial gradients of `input`. The first partial gradient starts at element `first` of
/// `gradients`. `rows` is the LSE/delta tensor, present only for the gradient of the queries.
pub(crate) fn sum_parts(
    gradients: &CubeTensor,
    first: usize,
    parts: usize,
    input: &CubeTensor,
    rows: Option<&CubeTensor>,
    vector: usize,
) -> CubeTensor {
    let client = gradients.client.clone();
    let gradient = empty(gradients, input.meta.shape().clone(), input.dtype);
    let vectors = gradient.meta.shape().num_elements() / vector;
    let units = 128;
    // SAFETY: unit `i` writes only vector `i` of `gradient`, and stops at once if `i` is not below `vectors`.
    // `gradients` holds `parts` partial gradients of `vectors` vectors each, starting at `first`.
    unsafe {
        kernel::sum_parts::launch_unchecked(
            &client,
            cube_count(&client, vectors.div_ceil(units)),
            CubeDim::new_1d(units as u32),
            address_type([gradients, &gradient]),
            tensor_arg(gradients),
            rows.map(tensor_arg).into(),
            tensor_arg(&gradient),
            first / vector,
            parts as u32,
            vectors,
            dtype_to_storage_type(input.dtype),
            vector,
        );
    }
    gradient
}

/// Adds up the `splits` f32 partial gradients of the tensor `input`, which lie one after another in the tensor `written`.
#[cfg(feature = "cuda")]
pub(crate) fn sum_splits(written: &CubeTensor, splits: usize, input: &CubeTensor) -> CubeTensor {
    let client = written.client.clone();
    let gradient = empty(written, input.meta.shape().clone(), input.dtype);
    let vector = match input.meta.shape()[3].is_multiple_of(4) {
        true => 4,
        false => 1,
    };
    let vectors = gradient.meta.shape().num_elements() / vector;
    let sharing = (splits / SPLITS_OF_A_UNIT)
        .next_power_of_two()
        .min(MOST_SHARING);
    // SAFETY: units whose vector is not below `vectors` neither read nor write. All other units read `written` at splits
    // below `splits`. Only one unit writes a vector of `gradient`.
    unsafe {
        kernel::sum_splits::launch_unchecked(
            &client,
            cube_count(&client, (vectors * sharing).div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            address_type([written, &gradient]),
            tensor_arg(written),
            tensor_arg(&gradient),
            splits as u32,
            vectors,
            sharing,
            dtype_to_storage_type(input.dtype),
            vector,
        );
    }
    gradient
}

/// The two constants limit the number of units that divide the splits of one vector. The number is about one unit per
/// `SPLITS_OF_A_UNIT` splits, and at most `MOST_SHARING` units.
#[cfg(feature = "cuda")]
const SPLITS_OF_A_UNIT: usize = 4;
#[cfg(feature = "cuda")]
const MOST_SHARING: usize = 16;
