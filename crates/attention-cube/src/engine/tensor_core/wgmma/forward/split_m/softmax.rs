//! The online softmax of a block in split-M. The module also packs P as the left operand of the GEMM `P V`.

use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::dropout::{draw_step, packed_step};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::softmax::{
    SoftmaxState, exp_scores, rescaled, softmax_state, thread_row_max,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitMTiles;
use cube_kit::nvidia::accumulator::pair;
use cube_kit::nvidia::ptx::computed_here;
use cubecl::prelude::*;

/// The exponentials of a block, and the state of the online softmax after the block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Step<NS: Size> {
    pub exp_scores: Vector<f32, NS>,
    pub softmax_state: SoftmaxState,
}

/// Computes the exponentials of a block from its scores, and updates the state of the online softmax.
#[cube]
pub(super) fn softmax<NS: Size>(
    s: Vector<f32, NS>,
    before: SoftmaxState,
    scale_log2: f32,
    negative_infinity: f32,
    #[comptime] tiles: WgmmaSplitMTiles,
) -> Step<NS> {
    let largest = thread_row_max::<NS>(s, before.row_max.reference, tiles.keys);
    let made = rescaled::<NS>(
        s,
        largest,
        before.row_max,
        scale_log2,
        negative_infinity,
        false,
        tiles.keys,
    );
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut values = Vector::<f32, NS>::zeroed();
    #[unroll]
    for step in 0..comptime!(tiles.keys / 16) {
        let part = exp_scores::<NS>(made.s, made.row_max.shift, scale_log2, step, false);
        #[unroll]
        for i in 0..8usize {
            values.insert(comptime!(8 * step + i), part.values.extract(i));
        }
        sum_0 += part.sums.first;
        sum_1 += part.sums.second;
    }
    Step::<NS> {
        exp_scores: values,
        softmax_state: softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1)),
    }
}

/// Draws the random words of dropout for the thread's scores of block `block`, four words for each 16 columns. The words do
/// not depend on the scores, so the warpgroup draws them while the tensor cores compute the scores.
///
/// If several heads share a tile, the two rows of a thread may belong to different heads, and the kernel uses all four
/// words. The words of a whole block would then need too many registers. In this case, and also for head sizes up to
/// [`LATE_DRAWS`], the function returns zeros, and [`packed`] draws the words later.
#[cube]
pub(super) fn draw_block<F: Float, NB: Size, NP: Size>(
    block: i32,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) -> Vector<u32, NP> {
    let mut words = Vector::<u32, NP>::zeroed();
    if comptime!(draws_ahead(tiles, kind)) {
        #[unroll]
        for step in 0..comptime!(tiles.keys / 16) {
            let column = block * comptime!(tiles.keys as i32) + comptime!(16 * step as i32);
            let own = draw_step::<F, NB>(scoring, rows, column, true);
            // The tile has one head. One draw then serves both rows of a thread, and fills only the first two of the
            // four words.
            #[unroll]
            for i in 0..2usize {
                words.insert(comptime!(4 * step + i), computed_here(own.extract(i)));
            }
        }
    }
    words
}

/// The largest head size for which the kernel draws the random words of dropout after the scores are ready.
///
/// Draws take issue slots, which the softmax of another warpgroup may need at the same time. On an H200 in bf16,
/// dropout makes a forward slower by a factor. At head size 128, this factor is 1.44 with late draws (after the scores
/// are ready) and 1.60 with early draws. At head size 256, it is 1.25 with late draws and 1.14 with early draws.
const LATE_DRAWS: usize = 128;

/// True if the kernel draws the random words of dropout before the scores are ready.
const fn draws_ahead(tiles: WgmmaSplitMTiles, kind: TileKind) -> bool {
    kind.fragment.score.dropout && kind.heads == 1 && tiles.head_dim > LATE_DRAWS
}

/// Packs P of block `block` as the left operand of the GEMM `P V`. If the kernel has dropout, dropped probabilities are
/// 0. `words` are the random words that [`draw_block`] has returned.
#[cube]
pub(super) fn packed<F: Float, NB: Size, NS: Size, NP: Size>(
    exp_scores: Vector<f32, NS>,
    words: Vector<u32, NP>,
    block: i32,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) -> Vector<u32, NP> {
    let mut p = Vector::<u32, NP>::zeroed();
    #[unroll]
    for step in 0..comptime!(tiles.keys / 16) {
        let mut values = Vector::<f32, Const<8>>::zeroed();
        #[unroll]
        for i in 0..8usize {
            values.insert(i, exp_scores.extract(comptime!(8 * step + i)));
        }
        let mut own_words = Vector::<u32, Const<4>>::zeroed();
        if comptime!(draws_ahead(tiles, kind)) {
            #[unroll]
            for i in 0..4usize {
                own_words.insert(i, words.extract(comptime!(4 * step + i)));
            }
        } else {
            let column = block * comptime!(tiles.keys as i32) + comptime!(16 * step as i32);
            let shares_cells = comptime!(kind.heads == 1);
            own_words = draw_step::<F, NB>(scoring, rows, column, shares_cells);
        }
        let own = packed_step::<F, NB>(
            values,
            own_words,
            scoring,
            comptime!(kind.heads == 1),
            tiles.half,
        );
        #[unroll]
        for i in 0..4usize {
            p.insert(comptime!(4 * step + i), own.extract(i));
        }
    }
    p
}
