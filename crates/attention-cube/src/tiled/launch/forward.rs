//! Launches the forward, of keys and values as they are or of their words, and the merge where the keys were split.

use crate::AttentionProblem;
use crate::arguments::{Extras, grid, score_arguments, score_kind, structure};
use crate::backend::{AttentionInputs, AttentionOutput};
use crate::passes::combine::join;
use crate::passes::lengths::Blocks;
use crate::tiled::forward::{ForwardKind, forward};
use crate::tiled::plan::ForwardPlan;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::ir::{ElemType, UIntKind};
use cubecl::prelude::CubeDim;

/// The scales of keys and of values, where the inputs' are words of int8: `[batch, kv_heads, kv_len]` in f32.
pub(crate) struct Scales {
    pub key: CubeTensor,
    pub value: CubeTensor,
}

pub(crate) fn launch(
    inputs: AttentionInputs<CubeBackend>,
    scales: Option<Scales>,
    problem: &AttentionProblem,
    plan: ForwardPlan,
) -> AttentionOutput<CubeBackend> {
    let ForwardPlan {
        tiles,
        packed,
        splits,
    } = plan;
    let AttentionProblem {
        batch,
        q_heads,
        kv_heads,
        q_len,
        value_dim,
        ..
    } = *problem;
    let client = inputs.query.client.clone();
    let split = splits > 1;

    let mut blocks = Blocks::of_queries(&tiles);
    if packed {
        // The rows of one tile are queries from all over the sequence.
        blocks.queries = q_len;
    }
    let (extras, places) = Extras::new(&inputs, problem, &[blocks]);
    let sinks = inputs.sinks.into_option();
    let sink_element = sinks.as_ref().map_or(extras.bias_element, |sinks| {
        dtype_to_storage_type(sinks.dtype)
    });

    let output_dtype = if split { DType::F32 } else { problem.dtype };
    // The parts lie one after the other, each with all sequences.
    let parts = splits * batch;
    let output = empty(
        &inputs.query,
        [parts, q_heads, q_len, value_dim],
        output_dtype,
    );
    // First all references, then all logarithms of the sums by these.
    let logsumexp = empty(&inputs.query, [2 * parts, q_heads, q_len], DType::F32);

    let (rows, heads) = if packed {
        (q_len * problem.group(), kv_heads)
    } else {
        (q_len, q_heads)
    };
    let (cubes, grid) = grid(rows.div_ceil(tiles.rows), splits, heads, batch, usize::MAX);
    let kind = ForwardKind {
        tiles,
        structure: structure(problem),
        score: score_kind(problem),
        packed,
        split,
    };
    let (key_element, key_vector) = match scales {
        Some(_) => (ElemType::UInt(UIntKind::U32), 1),
        None => (dtype_to_storage_type(problem.dtype), tiles.vector),
    };
    let (key_scales, value_scales) = scales.map(|scales| (scales.key, scales.value)).unzip();
    let kernel_sinks = if split { None } else { sinks.clone() };
    let addresses = address_type(
        [
            &inputs.query,
            &inputs.key,
            &inputs.value,
            &output,
            &logsumexp,
        ]
        .into_iter()
        .chain(&key_scales)
        .chain(&value_scales)
        .chain(extras.tensors()),
    );
    // SAFETY: the kernel reads rows and columns inside the shapes, by their strides, and writes the
    // outputs inside the shapes above, which it was given the sizes of.
    unsafe {
        forward::launch_unchecked(
            &client,
            cube_count(&client, cubes),
            CubeDim::new_1d(tiles.units as u32),
            addresses,
            inputs.query.into_tensor_arg(),
            inputs.key.into_tensor_arg(),
            inputs.value.into_tensor_arg(),
            key_scales.map(CubeTensor::into_tensor_arg).into(),
            value_scales.map(CubeTensor::into_tensor_arg).into(),
            extras.mask().into(),
            extras.bias().into(),
            extras.lengths_and_ids().into(),
            kernel_sinks.map(CubeTensor::into_tensor_arg).into(),
            output.clone().into_tensor_arg(),
            logsumexp.clone().into_tensor_arg(),
            grid,
            places[0].extent(problem),
            score_arguments(problem),
            problem.group() as u32,
            problem.head_dim as u32,
            value_dim as u32,
            kind,
            dtype_to_storage_type(problem.dtype),
            key_element,
            dtype_to_storage_type(tiles.product_dtype()),
            dtype_to_storage_type(output_dtype),
            extras.mask_element,
            extras.bias_element,
            sink_element,
            tiles.vector,
            key_vector,
        );
    }
    if split {
        join(output, logsumexp, sinks, problem, splits, tiles.vector)
    } else {
        AttentionOutput { output, logsumexp }
    }
}
