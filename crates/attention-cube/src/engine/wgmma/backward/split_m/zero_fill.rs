//! Rows of a block that nobody in the tile sees, which may hold anything: they are found and cleared before they are multiplied.

use super::MEETING;
use super::producer::Places;
use crate::engine::wgmma::backward::stationary::Held;
use crate::engine::wgmma::plan::GradientRowTiles;
use crate::engine::wgmma::tile::HopperKind;
use crate::engine::wgmma::zero_fill::{
    clear_unseen, forget_used, has_holes, has_strangers, tell_used, used_columns, used_words,
};
use crate::fragment::columns_end;
use crate::math::visibility::Extent;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::ptx::{barrier_wait, named_barrier};
use cube_kit::hopper::ring::stage_turn;
use cubecl::prelude::*;

/// Before the `count`-th block's part is added: zeros over its rows that nobody in the tile sees, whose product
/// with 0 may be no number. If it may have holes, it is the `holes`-th of that kind.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn clean<NP: Size>(
    p: Vector<u32, NP>,
    ds: Vector<u32, NP>,
    places: &Places,
    tile: &Held,
    extent: &Extent,
    block: i32,
    count: u32,
    may_have_holes: bool,
    holes: u32,
    #[comptime] tiles: GradientRowTiles,
    #[comptime] kind: HopperKind,
) {
    let first = block * comptime!(tiles.columns as i32);
    let length = columns_end(extent, kind.fragment.side);
    let words = used_words(places.used, holes);
    let strangers = has_strangers(&tile.run, length, first, tiles.columns);
    if comptime!(kind.leaves_holes()) {
        if may_have_holes {
            let used = if comptime!(tiles.sums.has_values()) {
                used_columns::<NP>(p, tiles.columns)
            } else {
                used_columns::<NP>(ds, tiles.columns)
            };
            tell_used(places.used, used, 0u32, holes);
            named_barrier(MEETING, comptime!(tiles.warpgroups * WARPGROUP));
            forget_used(places.used, holes);
            if has_holes(words, tiles.columns) {
                clear(places, tile, first, words, count, true, tiles);
            }
        } else if strangers {
            clear(places, tile, first, words, count, false, tiles);
        }
    } else if strangers {
        clear(places, tile, first, words, count, false, tiles);
    }
}

/// Writes zeros over rows of the `count`-th block that nobody in the tile sees, by the tile's run or by the `words`
/// of used rows.
#[cube]
fn clear(
    places: &Places,
    tile: &Held,
    first: i32,
    words: u32,
    count: u32,
    #[comptime] holes: bool,
    #[comptime] tiles: GradientRowTiles,
) {
    let units = comptime!(tiles.warpgroups * WARPGROUP);
    if comptime!(tiles.sums.has_dots()) {
        let stage = stage_turn(count, tiles.dot_stages).stage;
        clear_unseen(
            places.dots + stage * comptime!(tiles.dot_bytes() as u32),
            &tile.run,
            first,
            words,
            UNIT_POS,
            0usize,
            units,
            tiles.columns,
            comptime!(tiles.dot_subtiles()),
            holes,
        );
    }
    if comptime!(tiles.sums.has_values()) {
        let turn = stage_turn(count, tiles.value_stages);
        barrier_wait(places.value_full + 8u32 * turn.stage, turn.parity);
        clear_unseen(
            places.values + turn.stage * comptime!(tiles.value_bytes() as u32),
            &tile.run,
            first,
            words,
            UNIT_POS,
            0usize,
            units,
            tiles.columns,
            comptime!(tiles.value_subtiles()),
            holes,
        );
    }
    named_barrier(MEETING, units);
}
