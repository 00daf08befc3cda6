//! The TMA tensor maps of the forward kernels, and a function that writes zeros to the query rows that TMA does not copy.

use super::pages::{PageSources, PageTable};
use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind};
use crate::math::visibility::SeqLens;
use cube_kit::hopper::ptx::async_proxy_fence;
use cube_kit::nvidia::ROW_BYTES;
use cube_kit::nvidia::ptx::zero_fill_shared;
use cubecl::prelude::*;

/// The factors that turn batch and head indices into TMA coordinates: for each tensor, one factor for the batch index
/// and one for the head index. The factor is 0 if the tensor is broadcast in that dimension, else 1.
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

/// The TMA tensor maps of a forward, and the factors that turn batch and head indices into TMA coordinates.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ForwardMaps<E: Float> {
    pub query: TensorMap<E, Tiled>,
    pub key: TensorMap<E, Tiled>,
    pub value: TensorMap<E, Tiled>,
    /// The tensor map of the bias, or a placeholder if the kernel does not load the bias by TMA.
    pub bias: TensorMap<E, Tiled>,
    /// The tensor map of the output, or a placeholder if the kernel does not store the output by TMA.
    pub output: TensorMap<E, Tiled>,
    pub steps: Steps,
    /// The page table, if K and V lie in pages. The first dimension of K and V is then the page.
    pub page_table: ComptimeOption<PageTable>,
}

/// The addresses of the TMA tensor maps of Q, K and V, the page table, and the factors that turn batch and head indices
/// into TMA coordinates.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Sources {
    /// The addresses of the TMA tensor maps of Q, K and V.
    pub query: u64,
    pub key: u64,
    pub value: u64,
    pub steps: Steps,
    pub pages: PageSources,
}

/// Returns how many query rows of a tile TMA copies.
#[cube]
pub(crate) fn copied_rows(tile: &Tile, #[comptime] rows: usize, #[comptime] kind: TileKind) -> u32 {
    if comptime!(kind.heads > 1) {
        tile.head_rows as u32 * comptime!(kind.heads as u32)
    } else {
        u32::new(comptime!(rows as i64))
    }
}

/// If several heads share a tile, writes zeros to those rows of the tile that TMA does not copy. Stale data in these
/// rows could raise row maxima, and the kernel would rescale O without need.
///
/// After this call and before the first TMA copy, the caller must synchronize all threads of the CTA.
#[cube]
pub(crate) fn zero_fill_other_queries(
    queries: u32,
    seq_lens: &SeqLens,
    #[comptime] rows: usize,
    #[comptime] subtiles: usize,
    #[comptime] units: usize,
    #[comptime] kind: TileKind,
) {
    if comptime!(kind.heads > 1) {
        let first = seq_lens.q_len as u32 * comptime!((kind.heads * ROW_BYTES) as u32);
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
