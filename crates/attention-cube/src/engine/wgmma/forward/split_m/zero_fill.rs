//! Keys of a block that nobody in the tile sees, whose values may be anything: they are found and cleared before they are multiplied.

use super::producer::Places;
use crate::engine::wgmma::plan::SplitMTiles;
use crate::engine::wgmma::zero_fill::{
    forget_used, has_masked, has_out_of_range, tell_used, used_columns, used_words,
    zero_fill_unseen,
};
use crate::fragment::bias::lane_hides;
use crate::fragment::view::View;
use crate::fragment::work_tile::{Tile, TileKind};
use crate::math::visibility::Extent;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::pipeline::PipelineState;
use cube_kit::hopper::ptx::{barrier_arrive, barrier_wait, named_barrier};
use cubecl::prelude::*;

/// Whether a block that every query sees, but for what the bias hides, has a key that the bias hides from the tile's first query,
/// by the columns that this lane looks at. What is hidden from all is hidden from that, and every warp learns it by itself.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(super) fn first_row_hides<F: Float, NB: Size>(
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    tile: &Tile,
    block: i32,
    whole: bool,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) -> bool {
    let mut hides = false;
    if comptime!(kind.fragment.has_own_biases()) {
        if whole {
            hides = lane_hides::<F, NB>(
                bias,
                tile.batch,
                tile.first_head,
                tile.first_query as u32,
                block * comptime!(tiles.keys as i32),
                tiles.keys,
            );
        }
    }
    hides
}

/// Whether there may be keys in a block that nobody in the tile sees.
#[cube]
pub(super) fn may_have_masked_in(
    seen: &View,
    first_row_hides: bool,
    #[comptime] kind: TileKind,
) -> bool {
    if comptime!(kind.fragment.has_own_biases()) {
        !seen.whole || plane_any(first_row_hides)
    } else {
        seen.may_have_masked
    }
}

/// Tells which keys the warp's rows use of the `count`-th block that may have holes.
#[cube]
pub(super) fn tell_used_by<NP: Size>(
    places: &Places,
    p: Vector<u32, NP>,
    count: u32,
    elected: u32,
    #[comptime] tiles: SplitMTiles,
) {
    let used = used_columns::<NP>(p, tiles.keys);
    tell_used(places.used, used, 0u32, count);
    sync_plane();
    barrier_arrive(places.used_told + 8u32 * (count % 3u32), elected);
}

/// Before a block's values are multiplied, the tile's `last` or another: zeros in place of those that nobody in the tile sees.
/// If the block may have holes, it is the `count`-th of that kind.
#[cube]
pub(super) fn zero_fill_values(
    places: &Places,
    tile: &Tile,
    extent: &Extent,
    block: i32,
    slot: PipelineState,
    may_have_masked: bool,
    count: u32,
    #[comptime] last: bool,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) {
    let first_key = block * comptime!(tiles.keys as i32);
    // A run ends in its last block.
    let out_of_range = if comptime!(last) {
        has_out_of_range(&tile.keys, extent.kv_len, first_key, tiles.keys)
    } else {
        first_key < tile.keys.first
    };
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let words = used_words(places.used, count);
            barrier_wait(
                places.used_told + 8u32 * (count % 3u32),
                count / 3u32 % 2u32,
            );
            let dirty = has_masked(words, tiles.keys);
            forget_used(places.used, count);
            if dirty {
                clear(places, tile, first_key, slot, words, true, tiles);
            }
        } else if out_of_range {
            clear(places, tile, first_key, slot, 0u32, false, tiles);
        }
    } else if out_of_range {
        clear(places, tile, first_key, slot, 0u32, false, tiles);
    }
}

/// Writes zeros over values that nobody sees, by the tile's run or by the `words` of used keys.
#[cube]
fn clear(
    places: &Places,
    tile: &Tile,
    first_key: i32,
    slot: PipelineState,
    words: u32,
    #[comptime] masked: bool,
    #[comptime] tiles: SplitMTiles,
) {
    let units = comptime!(tiles.warpgroups * WARPGROUP);
    barrier_wait(places.value_full + 8u32 * slot.stage, slot.parity);
    zero_fill_unseen(
        places.values + slot.stage * comptime!(tiles.value_bytes() as u32),
        &tile.keys,
        first_key,
        words,
        UNIT_POS,
        0usize,
        units,
        tiles.keys,
        comptime!(tiles.value_subtiles()),
        masked,
    );
    named_barrier(2u32, units);
}
