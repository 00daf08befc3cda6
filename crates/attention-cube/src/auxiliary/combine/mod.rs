//! Launches the kernel that combines the partial outputs of a split-KV forward.

mod kernel;

use self::kernel::{Sharing, UNITS, combine_pdl};
use crate::auxiliary::combine::kernel::CombineSizesLaunch;
use crate::problem::AttentionProblem;
use crate::types::tensors::AttentionOutput;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;

/// The largest number of units that together combine the splits of one vector of an output row. For each vector, a
/// launch uses one unit per `PARTS_OF_A_UNIT` splits. The number of units is rounded up to a power of two.
const MOST_SHARING: usize = 16;
const PARTS_OF_A_UNIT: usize = 4;

/// The largest number of splits that a unit loads at once. A unit combines more splits than this number only if
/// `MOST_SHARING` units already divide the splits.
const MOST_HELD: usize = 2 * PARTS_OF_A_UNIT;

fn sharing(splits: usize) -> Sharing {
    let units = (splits / PARTS_OF_A_UNIT)
        .next_power_of_two()
        .min(MOST_SHARING);
    let parts = splits.div_ceil(units);
    // Round up the number of splits that a unit loads at once, so that launches with different numbers of splits share
    // one compiled kernel.
    let held = parts.next_multiple_of(PARTS_OF_A_UNIT).min(MOST_HELD);
    Sharing {
        units,
        held,
        more: parts > held,
    }
}

/// Combines the partial outputs and logsumexps of `splits` splits.
///
/// # Shapes
/// `partial_output [splits, batch, q_heads, q_len, value_dim]` and
/// `partial_logsumexp [2, splits, batch, q_heads, q_len]` in f32. The first half of `partial_logsumexp` holds the
/// reference scores, which are near the row maxima. The second half holds the logarithms of the softmax sums. The
/// returned output and logsumexp have the shapes of the problem's output and logsumexp.
pub(crate) fn combine_splits(
    partial_output: CubeTensor,
    partial_logsumexp: CubeTensor,
    sinks: Option<CubeTensor>,
    problem: &AttentionProblem,
    splits: usize,
    vector: usize,
) -> AttentionOutput<CubeBackend> {
    let output = empty(&partial_output, problem.output_shape(), problem.dtype);
    let logsumexp = empty(&partial_output, problem.logsumexp_parts_shape(), DType::F32);
    let client = output.client.clone();
    let rows = problem.batch * problem.q_heads * problem.q_len;
    let row_vectors = problem.value_dim / vector;
    let sharing = sharing(splits);
    let sink_dtype = sinks.as_ref().map_or(DType::F32, |sinks| sinks.dtype);
    // SAFETY: a unit whose row is not below `rows` reads no split and writes nothing. All other units read splits below
    // `splits` at rows below `rows`. Only one unit writes a vector of `output`.
    unsafe {
        combine_pdl::launch_unchecked(
            &client,
            cube_count(
                &client,
                (rows * row_vectors * sharing.units).div_ceil(UNITS),
            ),
            CubeDim::new_1d(UNITS as u32),
            address_type([&partial_output, &output]),
            partial_output.into_tensor_arg(),
            partial_logsumexp.into_tensor_arg(),
            sinks.map(CubeTensor::into_tensor_arg).into(),
            output.clone().into_tensor_arg(),
            logsumexp.clone().into_tensor_arg(),
            CombineSizesLaunch::new(
                splits as u32,
                rows as u32,
                problem.q_len as u32,
                problem.q_heads as u32,
                row_vectors as u32,
            ),
            f32::NEG_INFINITY,
            sharing,
            supports_pdl(&client),
            [
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(sink_dtype),
            ],
            vector,
        );
    }
    AttentionOutput { output, logsumexp }
}
