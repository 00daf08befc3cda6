//! Values of a block that nobody in the tile sees are cleared before they are multiplied.

use super::OWN_CHUNKS;
use super::producer::Places;
use crate::engine::wgmma::chunked::Ring;
use crate::engine::wgmma::plan::ColumnTiles;
use crate::engine::wgmma::tile::{HopperKind, Tile};
use crate::engine::wgmma::zero_fill::{clear_unseen, has_unseen, used_words};
use crate::math::visibility::Extent;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::barriers::warpgroup_barrier;
use cube_kit::hopper::ptx::barrier_wait;
use cube_kit::hopper::ring::stage_turn;
use cube_kit::hopper::wgmma::free_chunk;
use cubecl::prelude::*;

/// Before the `count`-th visited block's values, from chunk `passed` on, are multiplied: zeros in place of
/// those that nobody in the tile sees. Tells whether it waited for S, and freed the last chunk of keys.
#[cube]
pub(super) fn clean_values(
    places: &Places,
    tile: &Tile,
    extent: &Extent,
    block: i32,
    count: u32,
    passed: u32,
    key_empty: u32,
    ring: Ring,
    #[comptime] tiles: ColumnTiles,
    #[comptime] kind: HopperKind,
) -> bool {
    let first_key = block * comptime!(ColumnTiles::KEYS as i32);
    let words = used_words(places.used, count);
    let dirty = has_unseen(
        &tile.keys,
        extent.kv_len,
        first_key,
        places.used,
        count,
        ColumnTiles::KEYS,
        comptime!(kind.leaves_holes()),
    );
    if dirty {
        // The last chunk of values may need the stage of the last chunk of keys.
        free_chunk(key_empty, ring.elected, 0usize, 1usize);
        let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
        #[unroll]
        for own in 0..OWN_CHUNKS {
            let chunk = stage_turn(
                passed + warpgroup + comptime!((ColumnTiles::WARPGROUPS * own) as u32),
                tiles.stages,
            );
            barrier_wait(places.full + 8u32 * chunk.stage, chunk.parity);
            clear_unseen(
                places.stages + chunk.stage * comptime!(ColumnTiles::STAGE_BYTES as u32),
                &tile.keys,
                first_key,
                words,
                UNIT_POS % comptime!(WARPGROUP as u32),
                comptime!(own * ColumnTiles::VALUE_KEYS),
                WARPGROUP,
                ColumnTiles::VALUE_KEYS,
                comptime!(tiles.value_subtiles()),
                comptime!(kind.leaves_holes()),
            );
        }
        warpgroup_barrier();
    }
    dirty
}
