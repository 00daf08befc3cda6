//! Rows of a block that nobody in the tile sees, which may hold anything: they are found and cleared before they are multiplied.

use super::MEETING;
use super::producer::Places;
use crate::engine::wgmma::plan::GradientSplitMTiles;
use crate::engine::wgmma::zero_fill::{
    forget_used, has_masked, has_out_of_range, tell_used, used_columns, used_words,
    zero_fill_unseen,
};
use crate::fragment::columns_end;
use crate::fragment::stationary::Stationary;
use crate::fragment::work_tile::TileKind;
use crate::math::visibility::Extent;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_wait, named_barrier};
use cubecl::prelude::*;

/// Before the `count`-th block's part is added: zeros over its rows that nobody in the tile sees, whose product
/// with 0 may be no number. If it may have holes, it is the `masked`-th of that kind.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn zero_fill_block<NP: Size>(
    p: Vector<u32, NP>,
    ds: Vector<u32, NP>,
    places: &Places,
    tile: &Stationary,
    extent: &Extent,
    block: i32,
    count: u32,
    may_have_masked: bool,
    masked: u32,
    #[comptime] tiles: GradientSplitMTiles,
    #[comptime] kind: TileKind,
) {
    let first = block * comptime!(tiles.columns as i32);
    let length = columns_end(extent, kind.fragment.side);
    let words = used_words(places.used, masked);
    let out_of_range = has_out_of_range(&tile.run, length, first, tiles.columns);
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let used = if comptime!(tiles.sums.has_values()) {
                used_columns::<NP>(p, tiles.columns)
            } else {
                used_columns::<NP>(ds, tiles.columns)
            };
            tell_used(places.used, used, 0u32, masked);
            named_barrier(MEETING, comptime!(tiles.warpgroups * WARPGROUP));
            forget_used(places.used, masked);
            if has_masked(words, tiles.columns) {
                clear(places, tile, first, words, count, true, tiles);
            }
        } else if out_of_range {
            clear(places, tile, first, words, count, false, tiles);
        }
    } else if out_of_range {
        clear(places, tile, first, words, count, false, tiles);
    }
}

/// Writes zeros over rows of the `count`-th block that nobody in the tile sees, by the tile's run or by the `words`
/// of used rows.
///
/// By the run, another warpgroup may not be done with its S and dP of the block, which read these rows: whether it finds what was there, zeros
/// or some of either makes no difference. A row of the block makes one column of S and of dP and no other, and nobody sees that column. With
/// rows outside of the run a block is `whole` for nobody: hidden scores are replaced, so that P is 0, and P by its slope and dS are chosen to be
/// 0 where P is, whatever slope and dP are. By the words, all have met when their P and dS were made.
#[cube]
fn clear(
    places: &Places,
    tile: &Stationary,
    first: i32,
    words: u32,
    count: u32,
    #[comptime] masked: bool,
    #[comptime] tiles: GradientSplitMTiles,
) {
    let units = comptime!(tiles.warpgroups * WARPGROUP);
    if comptime!(tiles.sums.has_dots()) {
        let stage = pipeline_state(count, tiles.dot_stages).stage;
        zero_fill_unseen(
            places.dots + stage * comptime!(tiles.dot_bytes() as u32),
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
        barrier_wait(places.value_full + 8u32 * slot.stage, slot.parity);
        zero_fill_unseen(
            places.values + slot.stage * comptime!(tiles.value_bytes() as u32),
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
    named_barrier(MEETING, units);
}
