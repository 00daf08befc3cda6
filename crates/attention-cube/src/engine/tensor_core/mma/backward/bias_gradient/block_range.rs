//! The query tiles that a CTA processes to compute the gradient of one bias tile. If the bias is broadcast, several
//! query tiles (of several heads or sequences) use the bias tile. The work on one query tile is called a *visit*.

use crate::engine::tensor_core::common::block_range::may_intersect;
use crate::engine::tensor_core::common::scoring::Masking;
use crate::engine::tensor_core::common::stationary_tile::{
    Stationary, position_of, stationary_tile,
};
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use crate::math::schedule::WorkTile;
use cube_kit::nvidia::ptx::uniform;
use cubecl::prelude::*;

/// The visits of all CTAs that share a bias tile, numbered from 0. A visit is one query tile of one head and sequence
/// that uses the bias tile. The fields `query_tile`, `key_tile`, `head` and `batch` are the indices of the bias tile.
///
/// The visits may also be those of all CTAs that share a diagonal of tiles. A visit is then one tile of the diagonal. The
/// first tile takes the place of the bias tile, and `query_tiles` is the number of tiles.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Visits {
    pub query_tile: u32,
    pub key_tile: i32,
    pub head: u32,
    pub batch: u32,
    /// The number of query tiles of one head that use the bias tile. The number is 1 if the bias is not broadcast along
    /// queries.
    pub query_tiles: u32,
    /// The number of query heads that use the bias tile. The number is 1 if the bias is not broadcast along heads.
    pub heads: u32,
    /// The number of query heads per KV head.
    pub group: u32,
    /// The total number of visits of all CTAs that share the bias tile. A visit is one query tile of one head and sequence.
    pub count: u32,
    /// The difference between the number of a CTA's visit and the number of the CTA's next visit. A visit is one query
    /// tile of one head and sequence.
    pub step: u32,
    /// True if each visit has the key tile after that of the visit before. The visits then follow a diagonal of tiles,
    /// and `key_tile` is the key tile of visit 0. False if all visits have the key tile `key_tile`.
    #[cube(comptime)]
    pub along_diagonal: bool,
}

/// Returns the key tile of visit number `visit`.
#[cube]
pub(super) fn key_tile_of(visits: &Visits, visit: u32) -> i32 {
    if comptime!(visits.along_diagonal) {
        visits.key_tile + visit as i32
    } else {
        visits.key_tile
    }
}

/// Returns the query tile of visit number `visit`. A visit is one query tile of one head and sequence. In the returned
/// `Stationary`, the streamed blocks are the key tiles.
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
    stationary_tile(
        share,
        masking,
        visits.group,
        comptime!(tiles.rows()),
        tiles.columns,
        kind,
    )
}

/// Returns the first of the CTA's visits `visit`, `visit + step`, `visit + 2 · step`, … in which a query may see a key
/// of the visit's key tile. A visit is one query tile of one head and sequence. If no visit is left, the result is at
/// least `visits.count`.
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
        let key_tile = key_tile_of(visits, visit);
        let mut found = key_tile >= tile.first_block && key_tile < tile.end_block;
        if found {
            let position = position_of(&tile, 0u32, kind.fragment.side);
            found = may_intersect(&position, key_tile, masking, kind);
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
