//! Writes zeros over those rows of a block that no row of the tile sees. These hidden rows may hold NaN, and `0 · NaN`
//! is NaN.

use super::CONSUMER_BARRIER;
use super::producer::SharedOffsets;
use crate::engine::tensor_core::common::columns_end;
use crate::engine::tensor_core::common::stationary_tile::Stationary;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::plan::WgmmaGradientSplitMTiles;
use crate::engine::tensor_core::wgmma::zero_fill::{
    forget_used, has_masked, has_out_of_range, signal_used_keys, used_columns, used_words,
    zero_fill_unseen,
};
use crate::math::visibility::SeqLens;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::barrier_wait;
use cube_kit::nvidia::ptx::named_barrier;
use cubecl::prelude::*;

/// Writes zeros over those rows of the `count`-th block that no row of the tile sees. These hidden rows may hold NaN,
/// and `0 · NaN` is NaN.
///
/// If `may_have_masked`, the block may have hidden rows between visible rows. `masked` is the number of earlier blocks
/// of the tile for which `may_have_masked` was true.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(super) fn zero_fill_block<NP: Size>(
    p: Vector<u32, NP>,
    ds: Vector<u32, NP>,
    offsets: &SharedOffsets,
    tile: &Stationary,
    seq_lens: &SeqLens,
    block: i32,
    count: u32,
    may_have_masked: bool,
    masked: u32,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
    #[comptime] kind: TileKind,
) {
    let first = block * comptime!(tiles.columns as i32);
    let length = columns_end(seq_lens, kind.fragment.side);
    let words = used_words(offsets.used, masked);
    let out_of_range = has_out_of_range(&tile.run, length, first, tiles.columns);
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let used = if comptime!(!tiles.sums.has_values()) {
                used_columns::<NP>(ds, tiles.columns)
            } else if comptime!(tiles.sums.has_q_or_k() && kind.fragment.score.dropout) {
                // A column counts as used if P or dS is not 0 in the column. If dropout drops all probabilities of a
                // column, P is 0 in the column, but dS is not 0.
                used_columns::<NP>(p, tiles.columns) | used_columns::<NP>(ds, tiles.columns)
            } else {
                used_columns::<NP>(p, tiles.columns)
            };
            signal_used_keys(offsets.used, used, 0u32, masked);
            named_barrier(CONSUMER_BARRIER, comptime!(tiles.warpgroups * WARPGROUP));
            forget_used(offsets.used, masked);
            if has_masked(words, tiles.columns) {
                clear(offsets, tile, first, words, count, true, tiles);
            }
        } else if out_of_range {
            clear(offsets, tile, first, words, count, false, tiles);
        }
    } else if out_of_range {
        clear(offsets, tile, first, words, count, false, tiles);
    }
}

/// Writes zeros over those rows of the `count`-th block that no row of the tile sees. If `masked`, the bits at `words`
/// tell which block rows the tile sees. Otherwise the tile's visible range tells which block rows the tile sees.
///
/// Without `masked`, another warpgroup may read the hidden rows for its S and dP at the same time. It may then read the
/// old data or the zeros. Both give the same result: a hidden row affects only one column of S and dP, and P and dS are
/// 0 in this column.
///
/// With `masked`, no warpgroup still reads the hidden rows, because the caller has passed a barrier after all GEMMs of
/// S and dP.
#[cube]
fn clear(
    offsets: &SharedOffsets,
    tile: &Stationary,
    first: i32,
    words: u32,
    count: u32,
    #[comptime] masked: bool,
    #[comptime] tiles: WgmmaGradientSplitMTiles,
) {
    let units = comptime!(tiles.warpgroups * WARPGROUP);
    if comptime!(tiles.sums.has_q_or_k()) {
        let stage = pipeline_state(count, tiles.dot_stages).stage;
        zero_fill_unseen(
            offsets.q_or_k + stage * comptime!(tiles.dot_bytes() as u32),
            &tile.run,
            first,
            words,
            UNIT_POS,
            0usize,
            units,
            tiles.columns,
            comptime!(tiles.dot_subtiles()),
            masked,
        );
    }
    if comptime!(tiles.sums.has_values()) {
        let slot = pipeline_state(count, tiles.value_stages);
        barrier_wait(offsets.value_full + 8u32 * slot.stage, slot.parity);
        zero_fill_unseen(
            offsets.v_or_do + slot.stage * comptime!(tiles.value_bytes() as u32),
            &tile.run,
            first,
            words,
            UNIT_POS,
            0usize,
            units,
            tiles.columns,
            comptime!(tiles.value_subtiles()),
            masked,
        );
    }
    named_barrier(CONSUMER_BARRIER, units);
}
