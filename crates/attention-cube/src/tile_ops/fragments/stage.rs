//! The shared memory of a cube for the two products, `S = A Bᵀ` and `O += P B`.

use super::super::staged::StagedRows;
use super::super::vec4::{Four, Vec4};
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// The alignment of fragments in shared memory, in bytes. CUDA's compiler requires this alignment, and no other
/// compiler requires a larger one.
const ALIGNMENT: usize = 32;

/// The shared memory of a cube for the two products, `S = A Bᵀ` and `O += P B`.
#[derive(CubeType)]
pub(crate) struct FragmentStage<C: Float> {
    /// The chunks of the operands A and B that planes are multiplying.
    pub operands: Shared<[Four<C>]>,
    /// The shared memory for S. Fragments of O also pass through this memory.
    pub sums: Shared<[Vec4]>,
}

#[cube]
pub(in crate::tile_ops) fn new_stage<C: Float>(#[comptime] tiles: UnitTiles) -> FragmentStage<C> {
    FragmentStage::<C> {
        operands: Shared::new_aligned_slice(comptime!(tiles.stage_vectors()), ALIGNMENT),
        sums: Shared::new_aligned_slice(comptime!(tiles.score_vectors()), ALIGNMENT),
    }
}

#[cube]
pub(in crate::tile_ops) fn new_tile<C: Float>(#[comptime] tiles: UnitTiles) -> Shared<[Four<C>]> {
    Shared::new_aligned_slice(
        comptime!(tiles.left_tiles() * tiles.tile_vectors()),
        ALIGNMENT,
    )
}

/// Describes where an operand of the first product lies in shared memory. The operand has `count` rows, and its first
/// row starts at vector `at`.
pub(super) fn depth_rows(at: usize, count: usize, packed: bool, tiles: UnitTiles) -> StagedRows {
    StagedRows {
        at,
        count,
        vectors: tiles.depth / 4,
        pitch: tiles.depth_pitch(),
        interleaved: 0,
        packed,
        units: tiles.units,
    }
}
