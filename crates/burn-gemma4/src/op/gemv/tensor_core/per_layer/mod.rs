//! Launches a layer's per-layer embedding block on GPUs with clusters (Hopper and later). See [`kernel`] for the
//! algorithm.

mod kernel;
mod plan;

use super::super::BATCH_MAX_ROWS;
use super::super::per_layer::{BlockShape, PerLayerOutputs, PerLayerTensors};
use super::super::sums::FactorPlaceLaunch;
use super::codes::Codes;
use super::word_rows::WordRowsLaunch;
use super::{WORDS_OF_VECTOR, has_product, is_served};
use crate::op::launch::rows_of;
use crate::quant::layout::Layout;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::ampere::cp_async::PIECE;
use cube_kit::hopper::is_hopper;
use cube_kit::launch::{address_type, empty, exact_cube_count};
use cube_kit::nvidia::Half;
use cube_kit::pdl::supports_pdl;
use cubecl::{client::Client, prelude::CubeDim};
use kernel::{BlockInputsLaunch, per_layer_block_pdl};
use plan::{BlockPlan, CUBES};

/// True if the kernel supports blocks of this shape and `rows` rows.
pub(in super::super::super) fn serves(
    client: &Client,
    shape: BlockShape,
    rows: usize,
    dtype: DType,
) -> bool {
    plan_of(client, shape, rows, dtype).is_some()
}

/// Returns the division of a block among cubes and warps, or `None` if the kernel does not support the block.
fn plan_of(client: &Client, shape: BlockShape, rows: usize, dtype: DType) -> Option<BlockPlan> {
    let half = Half::of(dtype)?;
    let codes = |layout: Layout| {
        is_served(layout).then_some(Codes {
            bits: layout.format.bits,
            half,
        })
    };
    if rows > BATCH_MAX_ROWS || !is_hopper(client) || !has_product(client, half) {
        return None;
    }
    let plan = BlockPlan::new(
        rows,
        [shape.gate.columns, shape.projection.columns],
        [codes(shape.gate)?, codes(shape.projection)?],
        supports_pdl(client),
    )?;
    let most = client.properties().hardware.max_shared_memory_size;
    (plan.shared_memory() <= most).then_some(plan)
}

/// True if the tensors have the shapes of the plan, and the kernel can read them in their memory layouts.
fn reads(tensors: &PerLayerTensors<CubeBackend>, shape: BlockShape, plan: BlockPlan) -> bool {
    let dtype = tensors.stream.dtype;
    let rows = tensors.stream.meta.shape()[0];
    let words = |matrix: &CubeTensor, rows: usize, layout: Layout| {
        let (shape, strides) = (matrix.meta.shape(), matrix.meta.strides());
        !matrix.meta.is_tiled()
            && strides[1] == 1
            && strides[0].is_multiple_of(WORDS_OF_VECTOR)
            && shape[0] == rows
            && shape[1] == layout.words()
    };
    // A copy of a parameter would be written by a launch, for which the kernel does not wait before it reads parameters.
    let parameter = |parameter: &CubeTensor, columns: usize| {
        parameter.dtype == dtype
            && !parameter.meta.is_tiled()
            && parameter.meta.strides().last() == Some(&1)
            && parameter.meta.shape()[0] == columns
    };
    let activations = |tensor: &CubeTensor, columns: usize| {
        tensor.dtype == dtype && tensor.meta.shape()[0] == rows && tensor.meta.shape()[1] >= columns
    };
    words(&tensors.gate, plan.embedding, shape.gate)
        && words(&tensors.projection, plan.columns, shape.projection)
        && parameter(&tensors.scalar, 1)
        && [
            &tensors.norm_weight,
            &tensors.last_weight,
            &tensors.next_weight,
        ]
        .into_iter()
        .all(|weight| parameter(weight, plan.columns))
        && tensors.stream.meta.shape()[1] == plan.columns
        && tensors.added.meta.shape()[1] == plan.columns
        && activations(&tensors.added, plan.columns)
        && activations(&tensors.embedding, shape.start + plan.embedding)
}

/// Computes the block in one launch. If the kernel does not support the block, the error is the tensors.
pub(in super::super::super) fn launch(
    tensors: PerLayerTensors<CubeBackend>,
    shape: BlockShape,
) -> Result<PerLayerOutputs<CubeBackend>, Box<PerLayerTensors<CubeBackend>>> {
    let rows = tensors.stream.meta.shape()[0];
    let plan = plan_of(&tensors.stream.client, shape, rows, tensors.stream.dtype);
    let Some(plan) = plan.filter(|plan| reads(&tensors, shape, *plan)) else {
        return Err(Box::new(tensors));
    };
    let client = tensors.stream.client.clone();
    let (stream, added) = (
        into_contiguous(tensors.stream),
        into_contiguous(tensors.added),
    );
    let embedding = rows_of(tensors.embedding);
    let sizes = [rows, plan.columns];
    let sum = empty(&stream, sizes, stream.dtype);
    let normed = empty(&stream, sizes, stream.dtype);
    let word_rows = |words: &CubeTensor, layout: Layout, codes: Codes| {
        WordRowsLaunch::new(
            words.meta.strides()[0] as u32,
            layout.scales() as u32,
            layout.columns as u32,
            codes.mask(),
        )
    };
    let gate_rows = word_rows(&tensors.gate, shape.gate, plan.gate_codes);
    let projection_rows = word_rows(&tensors.projection, shape.projection, plan.projection_codes);
    let place = FactorPlaceLaunch::new(shape.start as u32, embedding.meta.strides()[0] as u32);
    let element = dtype_to_storage_type(stream.dtype);
    let addresses = address_type([&stream, &embedding, &tensors.gate, &tensors.projection]);
    // SAFETY: a row of the stream and of `added` has `plan.columns` columns, a layer's embedding `plan.embedding`
    // columns, and the matrices as many rows and columns as the plan says. Row indices are clamped to the last row. A
    // warp writes only rows below `rows`.
    unsafe {
        per_layer_block_pdl::launch_unchecked(
            &client,
            exact_cube_count(&client, rows.div_ceil(plan.rows) * CUBES),
            CubeDim::new_1d(plan.units() as u32),
            addresses,
            BlockInputsLaunch::new(
                stream.into_tensor_arg(),
                added.into_tensor_arg(),
                tensors.norm_weight.into_tensor_arg(),
                embedding.into_tensor_arg(),
                place,
                tensors.last_weight.into_tensor_arg(),
                tensors.scalar.into_tensor_arg(),
                tensors.next_weight.into_tensor_arg(),
                rows as u32,
                shape.epsilon as f32,
            ),
            tensors.gate.into_tensor_arg(),
            gate_rows,
            tensors.projection.into_tensor_arg(),
            projection_rows,
            sum.clone().into_tensor_arg(),
            normed.clone().into_tensor_arg(),
            plan,
            element,
            PIECE,
        );
    }
    Ok(PerLayerOutputs {
        stream: sum,
        normed,
    })
}
