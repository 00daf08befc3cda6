//! The part of a block's scores that one warp computes. The part has one or two 16-row fragments of the tile's rows,
//! and all or some of the block's columns.

use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::far::voted;
use crate::engine::tensor_core::common::gradient::LseDelta;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::{
    Seen, Stationary, lse_delta_of_tile, seen_by,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::math::side::Side;
use crate::math::visibility::{Run, SeqInfo, SeqLens};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The sizes of the part of a block's scores that one warp computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Part {
    /// The number of 16-row fragments: 1 or 2.
    pub fragments: usize,
    /// The number of score columns that the warp computes for a block.
    pub columns: usize,
    /// The number of columns in the whole block.
    pub block: usize,
}

/// LSE and delta of the rows in the warp's two fragments. If the warp has one fragment, `second` is a copy of `first`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpLseDelta<'a> {
    pub first: LseDelta<'a>,
    pub second: LseDelta<'a>,
}

/// Loads LSE and delta of the thread's rows if these rows are queries. `row` is the index in the tile of the thread's
/// first row. If the thread's rows are keys, the function loads no LSE and only checks whether any streamed query may
/// be *far*. A query is far if its LSE needs two f32.
#[cube]
pub(super) fn lse_delta_of_warp<'a>(
    lse_delta: &'a Tensor<f32>,
    tile: &Stationary,
    row: i32,
    seq_lens: &SeqLens,
    #[comptime] part: Part,
    #[comptime] kind: FragmentKind,
) -> WarpLseDelta<'a> {
    let row = tile.first_row + row;
    let first = lse_delta_of_tile(lse_delta, tile, row, seq_lens, part.block, kind);
    let first = voted(&first, kind);
    let second = if comptime!(part.fragments == 2 && kind.side == Side::Queries) {
        let row = row + comptime!(FRAGMENT_ROWS as i32);
        let second = lse_delta_of_tile(lse_delta, tile, row, seq_lens, part.block, kind);
        voted(&second, kind)
    } else {
        first
    };
    WarpLseDelta::<'a> { first, second }
}

/// Tells which columns of a block are visible to the rows of the warp's two fragments. If the warp has one fragment,
/// `second` is a copy of `first`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpSeen {
    pub first: Seen,
    pub second: Seen,
}

/// Returns which of the warp's columns of a block are visible to the thread's rows. `row` is the index in the tile of
/// the first of these rows. The warp's columns begin with column `32 · first_word` of the block.
#[cube]
pub(super) fn seen_by_warp<F: Float, NB: Size>(
    tile: &Stationary,
    row: i32,
    head: u32,
    block: i32,
    first_word: u32,
    scoring: &Scoring<F, NB>,
    #[comptime] part: Part,
    #[comptime] kind: TileKind,
) -> WarpSeen {
    let first = seen_by::<F, NB>(
        tile,
        row,
        head,
        block,
        first_word,
        scoring,
        part.block,
        part.columns,
        kind,
    );
    let second = if comptime!(part.fragments == 2) {
        let row = row + comptime!(FRAGMENT_ROWS as i32);
        seen_by::<F, NB>(
            tile,
            row,
            head,
            block,
            first_word,
            scoring,
            part.block,
            part.columns,
            kind,
        )
    } else {
        first
    };
    WarpSeen { first, second }
}

/// Tells the compiler that certain fields of the tile are equal in all lanes of the warp. The kernel has loaded these
/// fields from memory, so the compiler cannot know that they are equal. The compiler then keeps the fields in uniform
/// registers.
#[cube]
pub(super) fn alike(tile: Stationary) -> Stationary {
    let seq_info = tile.seq_info;
    let run = tile.run;
    Stationary {
        seq_info: SeqInfo {
            length: uniform(seq_info.length as u32) as i32,
            offset: uniform(seq_info.offset as u32) as i32,
            q_len: seq_info.q_len,
            left: seq_info.left,
            right: seq_info.right,
        },
        run: Run {
            first: uniform(run.first as u32) as i32,
            end: uniform(run.end as u32) as i32,
            common_first: uniform(run.common_first as u32) as i32,
            common_end: uniform(run.common_end as u32) as i32,
        },
        first_block: uniform(tile.first_block as u32) as i32,
        end_block: uniform(tile.end_block as u32) as i32,
        batch: tile.batch,
        head: tile.head,
        first_row: tile.first_row,
        rows: tile.rows,
        row_block: tile.row_block,
        first_head: tile.first_head,
        heads: tile.heads,
        part: tile.part,
    }
}
