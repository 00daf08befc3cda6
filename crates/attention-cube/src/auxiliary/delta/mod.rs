//! Launches the kernel that computes the logsumexp (LSE) and Δ of every query, before a backward.

pub(crate) mod kernel;

use self::kernel::{MULTIPLE, ROWS, TERMS, UNITS, row_lse_delta};
use crate::auxiliary::delta::kernel::LseDeltaSizesLaunch;
use crate::kernel_args::tensor_arg;
use crate::math::lse_form::LogsumexpForm;
use crate::problem::AttentionProblem;
use crate::types::tensors::AttentionSaved;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Returns the LSE/delta tensor, `[batch, q_heads, 5, padded q_len]` in f32. The header of `kernel.rs` lists the five rows.
pub(crate) fn rows_of_queries(
    saved: &AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    vector: usize,
    form: LogsumexpForm,
) -> CubeTensor {
    let AttentionProblem {
        batch,
        q_heads,
        q_len,
        ..
    } = *problem;
    let padded = q_len.next_multiple_of(MULTIPLE);
    let target = empty(&saved.output, [batch, q_heads, TERMS, padded], DType::F32);
    let client = target.client.clone();
    let planes = batch * q_heads;
    let logsumexp_gradient = saved.logsumexp_gradient.as_option();
    // SAFETY: the kernel reads its inputs only at heads below `planes` and queries below `q_len`. It writes `target` only at
    // heads below `planes` and queries below `padded`.
    unsafe {
        row_lse_delta::launch_unchecked(
            &client,
            cube_count(&client, planes * padded.div_ceil(ROWS as usize)),
            CubeDim::new_1d(UNITS),
            address_type([
                &saved.output,
                &saved.output_gradient,
                &saved.logsumexp,
                &target,
            ]),
            tensor_arg(&saved.output),
            tensor_arg(&saved.output_gradient),
            tensor_arg(&saved.logsumexp),
            logsumexp_gradient.map(tensor_arg).into(),
            target.clone().into_tensor_arg(),
            LseDeltaSizesLaunch::new(
                q_heads as u32,
                q_len as u32,
                padded as u32,
                planes as u32,
                problem.value_dim as u32,
            ),
            f32::INFINITY,
            form,
            dtype_to_storage_type(problem.dtype),
            vector,
        );
    }
    target
}
