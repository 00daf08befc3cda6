//! Values of a block that nobody in the tile sees are cleared before they are multiplied.

use super::OWN_CHUNKS;
use super::producer::Places;
use crate::engine::wgmma::chunked::Ring;
use crate::engine::wgmma::plan::SplitDTiles;
use crate::engine::wgmma::zero_fill::{has_unseen, used_words, zero_fill_unseen};
use crate::fragment::work_tile::{Tile, TileKind};
use crate::math::visibility::Extent;
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::barriers::warpgroup_barrier;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::barrier_wait;
use cube_kit::hopper::wgmma::free_chunk;
use cubecl::prelude::*;

/// Before the `count`-th visited block's values, from chunk `passed` on, are multiplied: zeros in place of
/// those that nobody in the tile sees. Tells whether it waited for S, and freed the last chunk of keys.
#[cube]
pub(super) fn zero_fill_values(
    places: &Places,
    tile: &Tile,
    extent: &Extent,
    block: i32,
    count: u32,
    passed: u32,
    key_empty: u32,
    ring: Ring,
    #[comptime] tiles: SplitDTiles,
    #[comptime] kind: TileKind,
) -> bool {
    let first_key = block * comptime!(SplitDTiles::KEYS as i32);
    let words = used_words(places.used, count);
    let dirty = has_unseen(
        &tile.keys,
        extent.kv_len,
        first_key,
        places.used,
        count,
        SplitDTiles::KEYS,
        comptime!(kind.leaves_masked()),
    );
    if dirty {
        // The last chunk of values may need the stage of the last chunk of keys.
        free_chunk(key_empty, ring.elected, 0usize, 1usize);
        let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
        #[unroll]
        for own in 0..OWN_CHUNKS {
            let chunk = pipeline_state(
                passed + warpgroup + comptime!((SplitDTiles::WARPGROUPS * own) as u32),
                tiles.stages,
            );
            barrier_wait(places.full + 8u32 * chunk.stage, chunk.parity);
            zero_fill_unseen(
                places.stages + chunk.stage * comptime!(SplitDTiles::STAGE_BYTES as u32),
                &tile.keys,
                first_key,
                words,
                UNIT_POS % comptime!(WARPGROUP as u32),
                comptime!(own * SplitDTiles::VALUE_KEYS),
                WARPGROUP,
                SplitDTiles::VALUE_KEYS,
                comptime!(tiles.value_subtiles()),
                comptime!(kind.leaves_masked()),
            );
        }
        warpgroup_barrier();
    }
    dirty
}
