//! Computes P and dS of a block in the split-M backward. A query is *far* if its LSE needs two f32 (`common/far.rs`).

use super::producer::SharedOffsets;
use crate::engine::tensor_core::common::bias::{BiasWords, add_words};
use crate::engine::tensor_core::common::dropout::keep_bits_ahead;
use crate::engine::tensor_core::common::gradient::{
    LseDelta, dot_gradients, lse_delta_of_block, weights,
};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::Seen;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::plan::WgmmaGradientSplitMTiles;
use crate::math::side::Side;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::async_proxy_fence;
use cube_kit::hopper::wgmma::{STEP, free_chunk, load_columns_as_rows, load_rows, take_fragment};
use cube_kit::nvidia::ROW_BYTES;
use cubecl::prelude::*;

/// P and dS, packed as left operands of the gradient GEMMs. P is computed only for dV, and dS only for dQ or dK.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Made<NP: Size> {
    pub p: Vector<u32, NP>,
    pub ds: Vector<u32, NP>,
}

/// The index of the warpgroup of a consumer thread, and a flag. The flag is 1 in the one thread of each warp that
/// arrives at barriers for the warp.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct ConsumerThread {
    pub warpgroup: u32,
    /// A flag that is 1 in the one thread of a warp that arrives at barriers for the warp, else 0.
    pub elected: u32,
}

/// Returns the LSE and delta that belong to the scores of the `count`-th block. If the streamed blocks are queries, the
/// returned value holds shared-memory addresses. TMA has copied the block's LSE and delta there, together with the
/// block's rows of Q. If the streamed blocks are keys, the returned value holds the LSE and delta from `row_lse_delta`.
#[cube]
fn block_lse_delta<'a>(
    row_lse_delta: &LseDelta<'a>,
    offsets: &SharedOffsets,
    count: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> LseDelta<'a> {
    let stage = pipeline_state(count, tiles.dot_stages).stage;
    let at = offsets.lse_delta + stage * comptime!(tiles.term_stride() as u32);
    lse_delta_of_block(row_lse_delta, at, tiles.columns)
}

/// Loads the thread's biases of the `count`-th block from shared memory. TMA has copied these biases there together
/// with the block's rows of Q or K.
#[cube]
fn block_biases(
    offsets: &SharedOffsets,
    count: u32,
    warpgroup: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) -> BiasWords {
    let stage = pipeline_state(count, tiles.dot_stages).stage;
    let at = offsets.biases + stage * comptime!(tiles.bias_bytes() as u32);
    if comptime!(tiles.side == Side::Queries) {
        load_rows::<Const<32>>(
            at + warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
            comptime!(tiles.rows()),
            comptime!(tiles.columns / STEP),
        )
    } else {
        load_columns_as_rows::<Const<32>>(
            at + warpgroup * comptime!((tiles.columns * ROW_BYTES) as u32),
            comptime!(tiles.columns / STEP),
        )
    }
}

/// Waits until S and dP of the `count`-th block are complete, and computes P and dS from them.
#[cube]
pub(super) fn compute_p_ds<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    dp: Vector<f32, NS>,
    seen: &Seen,
    row_lse_delta: &LseDelta<'_>,
    block: i32,
    scoring: &Scoring<F, NB>,
    offsets: &SharedOffsets,
    count: u32,
    thread: ConsumerThread,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
    #[comptime] kind: TileKind,
) -> Made<NP> {
    let used = comptime!(tiles.columns / 2);
    let fragment = comptime!(tiles.fragments()[0]);
    let lse_delta = block_lse_delta(row_lse_delta, offsets, count, tiles);
    // The keep bits of dropout do not depend on S, so the warpgroup draws them before it waits for S. The tensor cores
    // are busy during the draws.
    let first_column = block * comptime!(tiles.columns as i32);
    let keep =
        keep_bits_ahead::<F, NB>(scoring, &seen.rows, first_column, tiles.columns, tiles.side);
    let s = take_fragment::<NS>(
        s,
        used,
        fragment,
        comptime!(usize::from(tiles.sums.has_q_or_k())),
    );
    let s = if comptime!(tiles.bias_boxes) {
        add_words::<NS>(
            s,
            block_biases(offsets, count, thread.warpgroup, tiles),
            &scoring.arguments,
            tiles.columns,
            comptime!(kind.fragment.half_of_bias()),
            kind.fragment,
        )
    } else {
        s
    };
    let weights = weights::<F, NB, NS, NP>(
        s,
        &lse_delta,
        first_column,
        &seen.block_mask,
        &seen.rows,
        scoring,
        &keep,
        tiles.columns,
        comptime!(tiles.sums.has_values()),
        tiles.half,
        kind.fragment,
    );
    let ds = if comptime!(tiles.sums.has_q_or_k()) {
        let dp = take_fragment::<NS>(dp, used, fragment, 0usize);
        if comptime!(!tiles.sums.has_values()) {
            let stage = pipeline_state(count, tiles.value_stages).stage;
            free_chunk(
                offsets.value_empty + 8u32 * stage,
                thread.elected,
                0usize,
                1usize,
            );
        }
        dot_gradients::<NS, NP>(
            weights.w,
            dp,
            &lse_delta,
            &keep,
            &seen.block_mask,
            tiles.columns,
            tiles.half,
            kind.fragment,
        )
    } else {
        // The fence orders two accesses to one shared-memory buffer: the loads of this block's LSE, delta and biases,
        // and TMA's next write. Without the fence, some loads returned data of the next write.
        async_proxy_fence();
        let stage = pipeline_state(count, tiles.dot_stages).stage;
        free_chunk(
            offsets.dot_empty + 8u32 * stage,
            thread.elected,
            0usize,
            1usize,
        );
        Vector::<u32, NP>::zeroed()
    };
    Made::<NP> { p: weights.p, ds }
}
