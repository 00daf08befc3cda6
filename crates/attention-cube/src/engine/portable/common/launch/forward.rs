//! The launch of the forward, with float or quantized keys and values. If the keys are split, a second kernel combines
//! the partial outputs.

use crate::auxiliary::combine::combine_splits;
use crate::auxiliary::lengths::Blocks;
use crate::engine::api::RowScales;
use crate::engine::optional_inputs::OptionalInputs;
use crate::engine::portable::common::forward::{ForwardKind, forward};
use crate::engine::portable::common::plan::PortableForwardPlan;
use crate::kernel_args::head_sizes;
use crate::kernel_args::{grid, score_kind, structure};
use crate::math::inputs::ForwardInputsLaunch;
use crate::problem::AttentionProblem;
use crate::tile_ops::code_rows::word_element;
use crate::types::tensors::{AttentionInputs, AttentionOutput};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Launches the forward. With `scales`, keys and values are 8-bit codes, packed four to a word. Without `scales`, keys
/// and values are floats.
///
/// # Shapes
/// The output is `[batch, q_heads, q_len, value_dim]`. The logsumexp is `[2 · batch, q_heads, q_len]`, f32. The first
/// half of the logsumexp holds the scores that the softmax subtracted, which are near the row maxima. The second half
/// holds the natural logarithms of the row sums.
pub(crate) fn launch(
    inputs: AttentionInputs<CubeBackend>,
    scales: Option<RowScales>,
    problem: &AttentionProblem,
    plan: PortableForwardPlan,
) -> AttentionOutput<CubeBackend> {
    let PortableForwardPlan {
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

    let mut blocks = Blocks {
        longest_first: !packed,
        ..Blocks::of_queries(&tiles)
    };
    if packed {
        // Treat all queries of a sequence as one query block. A packed tile may have queries from any part of the
        // sequence, so the tile needs the segment bounds of all queries.
        blocks.queries = q_len;
    }
    let (optional_inputs, offsets) = OptionalInputs::new(&inputs, problem, &[blocks]);
    let sinks = inputs.sinks.into_option();
    let sink_element = sinks
        .as_ref()
        .map_or(optional_inputs.bias_element, |sinks| {
            dtype_to_storage_type(sinks.dtype)
        });

    let output_dtype = if split { DType::F32 } else { problem.dtype };
    // Allocate one partial output per split. The partial outputs lie one after another, and each covers all sequences.
    let parts = splits * batch;
    let output = empty(
        &inputs.query,
        [parts, q_heads, q_len, value_dim],
        output_dtype,
    );
    // The first half of the logsumexps holds the row maxima, the second half the natural logarithms of the row sums.
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
        page_len: problem.page_len.unwrap_or(0),
    };
    let page_table = inputs.page_table.into_option();
    let (key_element, key_vector) = match problem.quantized {
        Some(format) => (word_element(format), 1),
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
        .chain(&page_table)
        .chain(optional_inputs.tensors()),
    );
    // SAFETY: the kernel reads queries at rows below `q_len`, and keys, values and scales at rows below `kv_len`. The
    // kernel clamps page table entries to existing pages. The kernel writes only at queries below `q_len`, and at
    // indices below `parts` in the first dimension of `output` and of each half of `logsumexp`. The launch grid limits
    // the indices of heads and sequences.
    unsafe {
        forward::launch_unchecked(
            &client,
            cube_count(&client, cubes),
            CubeDim::new_1d(tiles.units as u32),
            addresses,
            ForwardInputsLaunch::new(
                inputs.query.into_tensor_arg(),
                inputs.key.into_tensor_arg(),
                inputs.value.into_tensor_arg(),
                key_scales.map(CubeTensor::into_tensor_arg).into(),
                value_scales.map(CubeTensor::into_tensor_arg).into(),
                page_table.map(CubeTensor::into_tensor_arg).into(),
            ),
            optional_inputs.scoring(offsets[0], problem),
            kernel_sinks.map(CubeTensor::into_tensor_arg).into(),
            output.clone().into_tensor_arg(),
            logsumexp.clone().into_tensor_arg(),
            grid,
            head_sizes(problem),
            kind,
            [
                dtype_to_storage_type(problem.dtype),
                key_element,
                dtype_to_storage_type(tiles.product_dtype()),
                dtype_to_storage_type(output_dtype),
                optional_inputs.mask_element,
                optional_inputs.bias_element,
                sink_element,
            ],
            [tiles.vector, key_vector],
        );
    }
    if split {
        combine_splits(output, logsumexp, sinks, problem, splits, tiles.vector)
    } else {
        AttentionOutput { output, logsumexp }
    }
}

/// Launches the forward over quantized keys and values. The 32-bit words of a row must be contiguous, so the function
/// first copies tensors whose rows are not contiguous.
pub(crate) fn launch_quantized(
    inputs: AttentionInputs<CubeBackend>,
    scales: RowScales,
    problem: &AttentionProblem,
    plan: PortableForwardPlan,
) -> AttentionOutput<CubeBackend> {
    let inputs = AttentionInputs {
        key: rows_in_order(inputs.key),
        value: rows_in_order(inputs.value),
        ..inputs
    };
    launch(inputs, Some(scales), problem, plan)
}

/// Returns the tensor if its rows are contiguous, else a contiguous copy.
fn rows_in_order(tensor: CubeTensor) -> CubeTensor {
    match tensor.meta.strides()[3] == 1 || tensor.meta.shape()[3] == 1 {
        true => tensor,
        false => into_contiguous(tensor),
    }
}
