//! The columns of a tile that contain a nonzero element.

use super::vec4::Four;
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// Marks each column of the tile that contains a nonzero element. The tile starts at vector `at`. The function syncs
/// the cube at its beginning and at its end.
#[cube]
pub(super) fn mark_used<C: Float>(
    tile: &Shared<[Four<C>]>,
    #[comptime] at: usize,
    used: &mut Shared<[u32]>,
    #[comptime] tiles: UnitTiles,
) {
    sync_cube();
    #[unroll]
    for step in 0..comptime!(tiles.columns().div_ceil(tiles.units)) {
        let column = UNIT_POS as usize + step * tiles.units;
        if column < comptime!(tiles.columns()) {
            let mut any = 0u32;
            for row in 0..tiles.rows {
                let values = tile[at + row * comptime!(tiles.tile_pitch()) + column / 4];
                #[unroll]
                for lane in 0..4usize {
                    // Compares in f32, because Vulkan cannot compare bf16 values.
                    let value = f32::cast_from(values.extract(lane));
                    if lane == column % 4 && value != 0.0f32 {
                        any = 1u32;
                    }
                }
            }
            used[column] = any;
        }
    }
    sync_cube();
}
