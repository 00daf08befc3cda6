//! Writes zeros over those rows of V that no row of the tile sees. These hidden rows may hold NaN, and `0 · NaN` is
//! NaN.

use super::producer::SharedOffsets;
use crate::engine::tensor_core::common::bias::lane_hides;
use crate::engine::tensor_core::common::block_mask::BlockMask;
use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind};
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitMTiles;
use crate::engine::tensor_core::wgmma::zero_fill::{
    forget_used, has_masked, has_out_of_range, signal_used_keys, used_columns, used_words,
    zero_fill_unseen,
};
use cube_kit::hopper::WARPGROUP;
use cube_kit::hopper::pipeline::PipelineState;
use cube_kit::hopper::ptx::{barrier_arrive, barrier_wait};
use cube_kit::nvidia::ptx::named_barrier;
use cubecl::prelude::*;

/// Returns true if a bias of −∞ hides one of the lane's keys from the tile's first query. If an option other than the
/// bias hides a score of the tile and block (`whole` is false), the function returns false without a check.
///
/// A key that is hidden from all queries is hidden from the first query. So the biases of the first query suffice to find
/// blocks that may have such a key.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(super) fn first_row_hides<F: Float, NB: Size>(
    bias: &ComptimeOption<OwnedTensor<Vector<F, NB>>>,
    tile: &Tile,
    block: i32,
    whole: bool,
    #[comptime] tiles: WgmmaSplitMTiles,
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

/// True if the block may have keys that are hidden from the whole tile.
#[cube]
pub(super) fn may_have_masked_in(
    block_mask: &BlockMask,
    first_row_hides: bool,
    #[comptime] kind: TileKind,
) -> bool {
    if comptime!(kind.fragment.score.mask_mod.is_some()) {
        true.runtime()
    } else if comptime!(kind.fragment.has_own_biases()) {
        !block_mask.whole || plane_any(first_row_hides)
    } else {
        block_mask.may_have_masked
    }
}

/// Sets the used bits of the keys that the warp's rows see, and arrives at the barrier of these bits. A used bit tells
/// whether some row of the tile sees a key. `count` is the block's index among those blocks of the CTA that may have
/// keys hidden from the whole tile.
#[cube]
pub(super) fn signal_used_keys_of<NP: Size>(
    offsets: &SharedOffsets,
    p: Vector<u32, NP>,
    count: u32,
    elected: u32,
    #[comptime] tiles: WgmmaSplitMTiles,
) {
    let used = used_columns::<NP>(p, tiles.keys);
    signal_used_keys(offsets.used, used, 0u32, count);
    sync_plane();
    barrier_arrive(offsets.used_ready + 8u32 * (count % 3u32), elected);
}

/// Writes zeros over those rows of V in a block that no row of the tile sees. Call this function before the GEMM `P V`.
/// `last` is true for the tile's last block. Rows of V at or past `zeros_from` are zeros already.
///
/// `may_have_masked` is true if the block may have keys that are hidden from the whole tile. `count` is the number of
/// earlier blocks of the CTA for which `may_have_masked` was true.
#[cube]
pub(super) fn zero_fill_values(
    offsets: &SharedOffsets,
    tile: &Tile,
    zeros_from: i32,
    block: i32,
    slot: PipelineState,
    may_have_masked: bool,
    count: u32,
    #[comptime] last: bool,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) {
    let first_key = block * comptime!(tiles.keys as i32);
    // The tile's visible range can end only in the tile's last block. So check the end of the range only there.
    let out_of_range = if comptime!(last) {
        has_out_of_range(&tile.keys, zeros_from, first_key, tiles.keys)
    } else {
        first_key < tile.keys.first
    };
    if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let words = used_words(offsets.used, count);
            barrier_wait(
                offsets.used_ready + 8u32 * (count % 3u32),
                count / 3u32 % 2u32,
            );
            let dirty = has_masked(words, tiles.keys);
            forget_used(offsets.used, count);
            if dirty {
                clear(offsets, tile, first_key, slot, words, true, tiles);
            }
        } else if out_of_range {
            clear(offsets, tile, first_key, slot, 0u32, false, tiles);
        }
    } else if out_of_range {
        clear(offsets, tile, first_key, slot, 0u32, false, tiles);
    }
}

/// Writes zeros over those rows of V in a block that no row of the tile sees. If `masked`, the bits at `words` tell
/// which keys the tile sees. Otherwise the tile's visible range tells which keys the tile sees.
#[cube]
fn clear(
    offsets: &SharedOffsets,
    tile: &Tile,
    first_key: i32,
    slot: PipelineState,
    words: u32,
    #[comptime] masked: bool,
    #[comptime] tiles: WgmmaSplitMTiles,
) {
    let units = comptime!(tiles.warpgroups * WARPGROUP);
    barrier_wait(offsets.value_full + 8u32 * slot.stage, slot.parity);
    zero_fill_unseen(
        offsets.values + slot.stage * comptime!(tiles.value_bytes() as u32),
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
