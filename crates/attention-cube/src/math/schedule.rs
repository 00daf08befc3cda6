//! Which tile a cube takes, and in which order: the heavy ones first.
//!
//! Cubes start roughly in the order of their number. Under a causal mask the last queries see the most
//! keys, so tiles are numbered from the last: what starts last is short, and no cube works alone at the end.
//! Heads and sequences vary fastest, so that the tiles in flight are equally heavy; but only as many of them
//! `together` as suits the cache, and then the next.

use cubecl::prelude::*;

/// The launch's cubes, as one number each.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Grid {
    /// Tiles of rows a head.
    pub tiles: u32,
    /// Parts that the keys of a tile are split into.
    pub splits: u32,
    /// Heads that tiles are counted in.
    pub heads: u32,
    /// Heads × sequences.
    pub planes: u32,
    /// How many of these come before the next tile of the first.
    pub together: u32,
    /// All cubes; the launch may have a few more.
    pub cubes: u32,
}

/// How often cubes take a share, where they stay for more than one.
#[cfg(feature = "cuda")]
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Schedule {
    /// Items of work.
    pub items: u32,
    /// Each cube takes every `launched`-th.
    pub launched: u32,
    /// 1 where an item is a tile and its mirror image in the sequence, else a cube's share.
    pub paired: u32,
}

/// A cube's share of the work.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WorkTile {
    pub tile: u32,
    pub split: u32,
    pub head: u32,
    pub batch: u32,
}

/// The share of cube `index`, tiles counted from the last if `last_first`.
#[cube]
pub(crate) fn work_tile(grid: &Grid, index: u32, #[comptime] last_first: bool) -> WorkTile {
    let whole = grid.together * grid.tiles * grid.splits;
    let first_plane = index / whole * grid.together;
    let together = min(grid.together, grid.planes - first_plane);
    let plane = first_plane + index % whole % together;
    let rest = index % whole / together;
    let split = rest % grid.splits;
    let mut tile = rest / grid.splits;
    if comptime!(last_first) {
        tile = grid.tiles - 1u32 - tile;
    }
    WorkTile {
        tile,
        split,
        head: plane % grid.heads,
        batch: plane / grid.heads,
    }
}

/// What a cube does in one of its turns.
#[cfg(feature = "cuda")]
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Assignment {
    pub work_tile: WorkTile,
    /// Not for the mirror image of the tile in the middle.
    pub exists: bool,
}

/// The `turn`-th turn at `item`. Under a causal mask a tile and its mirror image are together as heavy as any
/// two, so that cubes which take the same number of pairs end together.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn assignment(grid: &Grid, schedule: &Schedule, item: u32, turn: u32) -> Assignment {
    let work_tile = work_tile(grid, item, true);
    let mut tile = work_tile.tile;
    let mut head = work_tile.head;
    let mut batch = work_tile.batch;
    let mut exists = true;
    if schedule.paired == 1u32 {
        let pairs = block_count(grid.tiles as i32, 2i32) as u32;
        let plane = item / pairs;
        head = plane % grid.heads;
        batch = plane / grid.heads;
        tile = grid.tiles - 1u32 - item % pairs;
        if turn % 2u32 == 1u32 {
            exists = tile != item % pairs;
            tile = item % pairs;
        }
    }
    Assignment {
        work_tile: WorkTile {
            tile,
            split: work_tile.split,
            head,
            batch,
        },
        exists,
    }
}

/// The item after the `turn`-th turn.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn next_item(schedule: &Schedule, item: u32, turn: u32) -> u32 {
    // Under pairs, every second turn goes on.
    item + (1u32 - schedule.paired * (1u32 - turn % 2u32)) * schedule.launched
}

/// Blocks of `size` that `length` rows fill or begin.
#[cube]
pub(crate) fn block_count(length: i32, #[comptime] size: i32) -> i32 {
    (length + size - 1i32) / size
}
