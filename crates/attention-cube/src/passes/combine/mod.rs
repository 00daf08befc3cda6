//! Combines the parts of an output whose keys were split.

mod kernel;

use self::kernel::{Sharing, UNITS, combine_overlapped};
use crate::AttentionProblem;
use crate::backend::AttentionOutput;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::overlap::overlaps;
use cubecl::prelude::CubeDim;

/// Units that share the parts of a row's columns at most, and parts that each has before another joins.
const MOST_SHARING: usize = 16;
const PARTS_OF_A_UNIT: usize = 4;

/// Parts that a unit reads at once at most: with one less than twice its parts, nobody has joined yet.
const MOST_HELD: usize = 2 * PARTS_OF_A_UNIT;

fn sharing(splits: usize) -> Sharing {
    let units = (splits / PARTS_OF_A_UNIT)
        .next_power_of_two()
        .min(MOST_SHARING);
    let parts = splits.div_ceil(units);
    // Few kernels serve all numbers of parts.
    let held = parts.next_multiple_of(PARTS_OF_A_UNIT).min(MOST_HELD);
    Sharing {
        units,
        held,
        more: parts > held,
    }
}

/// Combines `splits` parts.
pub(crate) fn join(
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
    // SAFETY: a vector of the output has one unit, or several; the rest reads and writes nothing; the parts have the same rows.
    unsafe {
        combine_overlapped::launch_unchecked(
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
            splits as u32,
            rows as u32,
            problem.q_len as u32,
            problem.q_heads as u32,
            row_vectors as u32,
            f32::NEG_INFINITY,
            sharing,
            overlaps(&client),
            dtype_to_storage_type(problem.dtype),
            dtype_to_storage_type(sink_dtype),
            vector,
        );
    }
    AttentionOutput { output, logsumexp }
}
