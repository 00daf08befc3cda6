//! Writes zeros over those rows of V that no row of the tile sees. These hidden rows may hold NaN, and `0 · NaN` is
//! NaN.

use super::producer::SharedOffsets;
use super::warpgroups::OWN_CHUNKS;
use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind};
use crate::engine::tensor_core::wgmma::chunked_gemm::Ring;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitDTiles;
use crate::engine::tensor_core::wgmma::zero_fill::{has_unseen, used_words, zero_fill_unseen};
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::barriers::warpgroup_barrier;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::barrier_wait;
use cube_kit::hopper::wgmma::free_chunk;
use cubecl::prelude::*;

/// Writes zeros over those rows of V in the `count`-th block that no row of the tile sees. `passed` is the number of
/// chunks of K and V that pass through the ring before the block's first chunk of V. Call this function before the GEMM
/// `P V`. Rows of V at or past `zeros_from` are zeros already.
///
/// Returns true if the block has such hidden rows. If the block has hidden rows and a next block exists, the function
/// also waits for S of the next block. It then frees the next block's last chunk of K.
#[cube]
pub(super) fn zero_fill_values(
    offsets: &SharedOffsets,
    tile: &Tile,
    zeros_from: i32,
    block: i32,
    count: u32,
    passed: u32,
    key_empty: u32,
    ring: Ring,
    #[comptime] tiles: WgmmaSplitDTiles,
    #[comptime] kind: TileKind,
) -> bool {
    let first_key = block * comptime!(WgmmaSplitDTiles::KEYS as i32);
    let words = used_words(offsets.used, count);
    let dirty = has_unseen(
        &tile.keys,
        zeros_from,
        first_key,
        offsets.used,
        count,
        WgmmaSplitDTiles::KEYS,
        comptime!(kind.leaves_masked()),
    );
    if dirty {
        // The last chunk of V may need the shared-memory buffer that holds the last chunk of K of the next block. So
        // free that buffer first.
        free_chunk(key_empty, ring.elected, 0usize, 1usize);
        let warpgroup = UNIT_POS / comptime!(WARPGROUP as u32);
        #[unroll]
        for own in 0..OWN_CHUNKS {
            let chunk = pipeline_state(
                passed + warpgroup + comptime!((WgmmaSplitDTiles::WARPGROUPS * own) as u32),
                tiles.stages,
            );
            barrier_wait(offsets.full + 8u32 * chunk.stage, chunk.parity);
            zero_fill_unseen(
                offsets.stages + chunk.stage * comptime!(WgmmaSplitDTiles::STAGE_BYTES as u32),
                &tile.keys,
                first_key,
                words,
                UNIT_POS % comptime!(WARPGROUP as u32),
                comptime!(own * WgmmaSplitDTiles::VALUE_KEYS),
                WARPGROUP,
                WgmmaSplitDTiles::VALUE_KEYS,
                comptime!(tiles.value_subtiles()),
                comptime!(kind.leaves_masked()),
            );
        }
        warpgroup_barrier();
    }
    dirty
}
