//! The GEMMs of a block in the split-M backward. The gradient GEMMs compute dQ, dK or dV.

use super::producer::SharedOffsets;
use crate::engine::tensor_core::wgmma::plan::WgmmaGradientSplitMTiles;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::barrier_wait;
use cube_kit::hopper::wgmma::{
    descriptor, free_chunk, multiply_output, multiply_scores, take_sums, transposed_descriptor,
};
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The registers of a warpgroup's gradients: dQ or dK, and dV.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Gradients<ND: Size, NV: Size> {
    pub q_or_k: Vector<f32, ND>,
    pub v_or_do: Vector<f32, NV>,
}

/// The operands of a warpgroup's GEMMs. Each operand is given as the lower 32 bits of its shared memory descriptor. The
/// fields `summed_*` are descriptors of transposed operands, for the gradient GEMMs.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub stationary_qk: u32,
    pub stationary_v_do: u32,
    pub q_or_k: u32,
    pub v_or_do: u32,
    pub summed_q_or_k: u32,
    pub summed_v_or_do: u32,
}

#[cube]
pub(super) fn operands(
    offsets: &SharedOffsets,
    warpgroup: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> Operands {
    let own_rows = warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32);
    let subtile_bytes = comptime!(tiles.columns * ROW_BYTES);
    Operands {
        stationary_qk: uniform(descriptor(offsets.stationary_qk + own_rows)),
        stationary_v_do: uniform(descriptor(offsets.stationary_v_do + own_rows)),
        q_or_k: descriptor(offsets.q_or_k),
        v_or_do: descriptor(offsets.v_or_do),
        summed_q_or_k: transposed_descriptor(offsets.q_or_k, subtile_bytes),
        summed_v_or_do: transposed_descriptor(offsets.v_or_do, subtile_bytes),
    }
}

/// The right operands of the GEMMs with one block. Each operand is given as the lower 32 bits of its shared memory
/// descriptor.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct BlockOperands {
    pub q_or_k: u32,
    pub v_or_do: u32,
}

/// Returns the shared memory descriptors of the `count`-th block's right operands. `q_or_k` is the descriptor of the
/// first buffer in the ring for Q or K. `v_or_do` is the descriptor of the first buffer in the ring for V or dO.
#[cube]
pub(super) fn block_operands(
    q_or_k: u32,
    v_or_do: u32,
    count: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> BlockOperands {
    let dot_stage = pipeline_state(count, tiles.dot_stages).stage;
    let value_stage = pipeline_state(count, tiles.value_stages).stage;
    BlockOperands {
        q_or_k: uniform(q_or_k + dot_stage * comptime!((tiles.dot_bytes() >> 4) as u32)),
        v_or_do: uniform(v_or_do + value_stage * comptime!((tiles.value_bytes() >> 4) as u32)),
    }
}

/// Waits until the rows of Q or K of the `count`-th block are in shared memory.
#[cube]
pub(super) fn await_q_or_k(
    offsets: &SharedOffsets,
    count: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) {
    let slot = pipeline_state(count, tiles.dot_stages);
    barrier_wait(offsets.dot_full + 8u32 * slot.stage, slot.parity);
}

/// Waits until the rows of V or dO of the `count`-th block are in shared memory.
#[cube]
pub(super) fn await_values(
    offsets: &SharedOffsets,
    count: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) {
    let slot = pipeline_state(count, tiles.value_stages);
    barrier_wait(offsets.value_full + 8u32 * slot.stage, slot.parity);
}

/// Starts the GEMM that computes S of a block.
#[cube]
pub(super) fn start_s<NS: Size>(
    stationary_tile: u32,
    block: BlockOperands,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> Vector<f32, NS> {
    multiply_scores::<NS>(
        stationary_tile,
        block.q_or_k,
        comptime!(tiles.score_product(tiles.head_dim)),
    )
}

/// Starts the GEMM that computes dP of a block. The function starts no GEMM if the kernel does not need dP.
#[cube]
pub(super) fn start_dp<NS: Size>(
    stationary_tile: u32,
    block: BlockOperands,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> Vector<f32, NS> {
    if comptime!(tiles.sums.has_q_or_k()) {
        multiply_scores::<NS>(
            stationary_tile,
            block.v_or_do,
            comptime!(tiles.score_product(tiles.value_dim)),
        )
    } else {
        Vector::<f32, NS>::zeroed()
    }
}

/// Starts the gradient GEMMs of a block.
#[cube]
pub(super) fn multiply<NP: Size, ND: Size, NV: Size>(
    q_or_k: Vector<f32, ND>,
    v_or_do: Vector<f32, NV>,
    p: Vector<u32, NP>,
    ds: Vector<u32, NP>,
    block: BlockOperands,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> Gradients<ND, NV> {
    let v_or_do = if comptime!(tiles.sums.has_values()) {
        multiply_output::<NV, NP>(
            v_or_do,
            p,
            block.v_or_do,
            comptime!(tiles.sum_product(tiles.value_columns())),
        )
    } else {
        v_or_do
    };
    let q_or_k = if comptime!(tiles.sums.has_q_or_k()) {
        multiply_output::<ND, NP>(
            q_or_k,
            ds,
            block.q_or_k,
            comptime!(tiles.sum_product(tiles.dot_columns())),
        )
    } else {
        q_or_k
    };
    Gradients::<ND, NV> { q_or_k, v_or_do }
}

/// Waits until at most `pending` wgmma groups are in flight. The gradient GEMMs of the block are then complete. Frees
/// the shared-memory buffers of the block, and returns the gradients.
#[cube]
pub(super) fn settle<NP: Size, ND: Size, NV: Size>(
    sums: Gradients<ND, NV>,
    p: Vector<u32, NP>,
    ds: Vector<u32, NP>,
    offsets: &SharedOffsets,
    count: u32,
    elected: u32,
    #[comptime] pending: usize,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> Gradients<ND, NV> {
    let fragments = comptime!(tiles.fragments());
    let v_or_do = if comptime!(tiles.sums.has_values()) {
        let pending = comptime!(pending + usize::from(tiles.sums.has_q_or_k()));
        let v_or_do = take_sums::<NV, NP>(
            sums.v_or_do,
            p,
            comptime!(tiles.value_columns() / 2),
            comptime!(fragments[3]),
            pending,
        );
        let stage = pipeline_state(count, tiles.value_stages).stage;
        free_chunk(offsets.value_empty + 8u32 * stage, elected, pending, 1usize);
        v_or_do
    } else {
        sums.v_or_do
    };
    let q_or_k = if comptime!(tiles.sums.has_q_or_k()) {
        let q_or_k = take_sums::<ND, NP>(
            sums.q_or_k,
            ds,
            comptime!(tiles.dot_columns() / 2),
            comptime!(fragments[2]),
            pending,
        );
        let stage = pipeline_state(count, tiles.dot_stages).stage;
        free_chunk(offsets.dot_empty + 8u32 * stage, elected, pending, 1usize);
        q_or_k
    } else {
        sums.q_or_k
    };
    Gradients::<ND, NV> { q_or_k, v_or_do }
}
