//! Before a backward: the logsumexp and Δ of every query.

pub(crate) mod form;
pub(crate) mod kernel;

use self::form::LogsumexpForm;
use self::kernel::{MULTIPLE, ROWS, TERMS, UNITS, row_terms};
use crate::AttentionProblem;
use crate::backend::AttentionSaved;
use crate::passes::backward::BackwardPass;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// The terms of every query, `[batch, q_heads, 4, padded q_len]`.
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
    let row_count = batch * q_heads * padded;
    let logsumexp_gradient = saved.logsumexp_gradient.as_option();
    // SAFETY: rows past `row_count` are neither read nor written.
    unsafe {
        row_terms::launch_unchecked(
            &client,
            cube_count(&client, row_count.div_ceil(ROWS as usize)),
            CubeDim::new_1d(UNITS),
            address_type([&saved.output, &saved.output_gradient]),
            BackwardPass::arg(&saved.output),
            BackwardPass::arg(&saved.output_gradient),
            BackwardPass::arg(&saved.logsumexp),
            logsumexp_gradient.map(BackwardPass::arg).into(),
            target.clone().into_tensor_arg(),
            q_heads as u32,
            q_len as u32,
            padded as u32,
            row_count as u32,
            problem.value_dim as u32,
            f32::INFINITY,
            form,
            dtype_to_storage_type(problem.dtype),
            vector,
        );
    }
    target
}
