//! The addresses of the areas in shared memory: queries, P, row maxima, rescale factors, flags and barriers.

use super::warp_roles::Roles;
use crate::engine::tensor_core::mma::plan::split_d::MmaSplitDTiles;
use cubecl::prelude::*;

/// The shared-memory addresses of the queries, of the data that the warps exchange, and of the barriers.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SharedOffsets {
    pub queries: u32,
    pub probabilities: u32,
    pub row_max_at: u32,
    pub factors: u32,
    pub moved: u32,
    pub used: u32,
    /// The address of the barriers of the warp's row group. A row group is the warps that compute the same output rows.
    pub meetings: u32,
}

#[cube]
pub(super) fn offsets(
    start: u32,
    roles: &Roles,
    #[comptime] tiles: MmaSplitDTiles,
) -> SharedOffsets {
    SharedOffsets {
        queries: start,
        probabilities: start + comptime!(tiles.probabilities_at() as u32),
        row_max_at: start + comptime!(tiles.maxima_at() as u32),
        factors: start + comptime!(tiles.factors_at() as u32),
        moved: start + comptime!(tiles.moved_at() as u32),
        used: start + comptime!(tiles.used_at() as u32),
        meetings: start
            + comptime!(tiles.meetings_at() as u32)
            + roles.row_group * comptime!(MmaSplitDTiles::MEETING_BARRIERS as u32),
    }
}
