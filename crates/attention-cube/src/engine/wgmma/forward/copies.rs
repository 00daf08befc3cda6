//! What TMA copies for a tile of the forward, and what it leaves.

use crate::fragment::work_tile::{Tile, TileKind};
use crate::math::visibility::Extent;
use cube_kit::hopper::ROW_BYTES;
use cube_kit::hopper::ptx::{async_proxy_fence, zero_fill_shared};
use cubecl::prelude::*;

/// Which way sequences and heads lead through a tensor: 0 where it is broadcast, else 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Steps {
    pub query_batch: u32,
    pub key_batch: u32,
    pub key_head: u32,
    pub value_batch: u32,
    pub value_head: u32,
    pub bias_batch: u32,
    pub bias_head: u32,
}

/// Where TMA copies a forward's operands from.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Sources {
    /// Addresses of the operands' maps.
    pub query: u64,
    pub key: u64,
    pub value: u64,
    pub steps: Steps,
}

/// Rows that the copy engine brings for a tile.
#[cube]
pub(crate) fn copied_rows(tile: &Tile, #[comptime] rows: usize, #[comptime] kind: TileKind) -> u32 {
    if comptime!(kind.heads > 1) {
        tile.head_rows as u32 * comptime!(kind.heads as u32)
    } else {
        u32::new(comptime!(rows as i64))
    }
}

/// Where heads share a tile, writes zeros over its rows that no copy fills: what lay there would take part in moving the
/// references of the rows beside them. All threads of the cube meet afterwards, before anything is copied.
#[cube]
pub(crate) fn zero_fill_other_queries(
    queries: u32,
    extent: &Extent,
    #[comptime] rows: usize,
    #[comptime] subtiles: usize,
    #[comptime] units: usize,
    #[comptime] kind: TileKind,
) {
    if comptime!(kind.heads > 1) {
        let first = extent.q_len as u32 * comptime!((kind.heads * ROW_BYTES) as u32);
        let end = comptime!((rows * ROW_BYTES) as u32);
        #[unroll]
        for subtile in 0..subtiles {
            let mut at = first + 16u32 * UNIT_POS;
            while at < end {
                zero_fill_shared(queries + comptime!((subtile * rows * ROW_BYTES) as u32) + at);
                at += comptime!(16 * units as u32);
            }
        }
        async_proxy_fence();
    }
}
