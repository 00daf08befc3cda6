//! Which tiles of queries a cube visits.

use crate::engine::mma::plan::BiasGradientTiles;
use crate::fragment::scoring::Masking;
use crate::fragment::stationary::{Stationary, held, position_of};
use crate::fragment::visits::meets;
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::WorkTile;
use cube_kit::hopper::ptx::uniform;
use cubecl::prelude::*;

/// The pairs of batch, head and query tile that share a tile of the bias, counted by a visit's number.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Visits {
    pub query_tile: u32,
    pub key_tile: i32,
    pub head: u32,
    pub batch: u32,
    /// Query tiles and heads along which the bias is broadcast, 1 where it is not.
    pub query_tiles: u32,
    pub heads: u32,
    /// The group's size: query heads of a key head.
    pub group: u32,
    /// The number of visits, and the step between those of this cube.
    pub count: u32,
    pub step: u32,
}

/// The query tile of a visit. Its blocks are tiles of keys.
#[cube]
pub(super) fn tile_of(
    visits: &Visits,
    visit: u32,
    masking: &Masking,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
) -> Stationary {
    let share = WorkTile {
        tile: visits.query_tile + visit % visits.query_tiles,
        split: 0u32.runtime(),
        head: visits.head + visit / visits.query_tiles % visits.heads,
        batch: visits.batch + visit / visits.query_tiles / visits.heads,
    };
    held(
        share,
        masking,
        visits.group,
        comptime!(tiles.rows()),
        tiles.columns,
        kind,
    )
}

/// The first visit from `visit` on whose queries may see the key tile, or one from the count on.
#[cube]
pub(super) fn next_visit(
    visits: &Visits,
    visit: u32,
    masking: &Masking,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: TileKind,
) -> u32 {
    let mut visit = visit;
    let mut searching = visit < visits.count;
    while searching {
        let tile = tile_of(visits, visit, masking, tiles, kind);
        let mut found = visits.key_tile >= tile.first_block && visits.key_tile < tile.end_block;
        if found {
            let position = position_of(&tile, 0u32, kind.fragment.side);
            found = meets(&position, visits.key_tile, masking, kind);
        }
        if found {
            searching = false;
        } else {
            visit += visits.step;
            searching = visit < visits.count;
        }
    }
    uniform(visit)
}
