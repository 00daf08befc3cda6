//! Launches a layer's per-layer embedding block on GPUs with clusters (Hopper and later). See [`kernel`] for the
//! algorithm.

mod kernel;
mod plan;

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

/// True if the kernel supports blocks of this shape.
pub(in super::super::super) fn serves(client: &Client, shape: BlockShape, dtype: DType) -> bool {
    plan_of(client, shape, dtype).is_some()
}

/// Returns the division of a block among cubes and warps, or `None` if the kernel does not support the block.
fn plan_of(client: &Client, shape: BlockShape, dtype: DType) -> Option<BlockPlan> {
    let half = Half::of(dtype)?;
    let codes = |layout: Layout| {
        is_served(layout).then_some(Codes {
            bits: layout.format.bits,
            half,
        })
    };
    if !is_hopper(client) || !has_product(client, half) {
        return None;
    }
    let plan = BlockPlan::new(
        shape.rows,
        [shape.gate.columns, shape.projection.columns],
        [codes(shape.gate)?, codes(shape.projection)?],
        supports_pdl(client),
    )?;
    let most = client.properties().hardware.max_shared_memory_size;
    (plan.shared_memory() <= most).then_some(plan)
}

/// True if the kernel can read these tensors in their memory layouts.
fn reads(tensors: &PerLayerTensors<CubeBackend>) -> bool {
    let words = |matrix: &CubeTensor| {
        let strides = matrix.meta.strides();
        !matrix.meta.is_tiled() && strides[1] == 1 && strides[0].is_multiple_of(WORDS_OF_VECTOR)
    };
    // A copy of a parameter would be written by a launch, for which the kernel does not wait before it reads parameters.
    let parameter = |parameter: &CubeTensor| {
        parameter.dtype == tensors.stream.dtype
            && !parameter.meta.is_tiled()
            && parameter.meta.strides().last() == Some(&1)
    };
    let parameters = [
        &tensors.norm_weight,
        &tensors.last_weight,
        &tensors.scalar,
        &tensors.next_weight,
    ];
    words(&tensors.gate)
        && words(&tensors.projection)
        && parameters.into_iter().all(parameter)
        && tensors.added.dtype == tensors.stream.dtype
        && tensors.embedding.dtype == tensors.stream.dtype
}

/// Computes the block in one launch. If the kernel does not support the block, the error is the tensors.
pub(in super::super::super) fn launch(
    tensors: PerLayerTensors<CubeBackend>,
    shape: BlockShape,
) -> Result<PerLayerOutputs<CubeBackend>, Box<PerLayerTensors<CubeBackend>>> {
    let plan = plan_of(&tensors.stream.client, shape, tensors.stream.dtype);
    let Some(plan) = plan.filter(|_| reads(&tensors)) else {
        return Err(Box::new(tensors));
    };
    let client = tensors.stream.client.clone();
    let (stream, added) = (
        into_contiguous(tensors.stream),
        into_contiguous(tensors.added),
    );
    let embedding = rows_of(tensors.embedding);
    let sizes = [shape.rows, plan.columns];
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
            exact_cube_count(&client, shape.rows.div_ceil(plan.rows) * CUBES),
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
                shape.rows as u32,
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
