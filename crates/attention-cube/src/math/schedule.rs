//! The tile scheduler assigns a tile to each cube, and starts the longest tiles first.
//!
//! Cubes start roughly in the order of their index. Under a causal mask the last queries see the most keys, so tiles
//! are numbered in descending order of their queries. Short tiles come last, so that at the end of the launch no cube
//! still runs a long tile while the other multiprocessors are idle.
//!
//! The scheduler divides the (head, sequence) pairs into groups. The operands of one group fit into the L2 cache. All
//! tiles of a group start before the tiles of the next group, so each tile finds its group's operands in the cache.

use cubecl::prelude::*;

/// The grid of a launch. The cubes of the grid are numbered in one dimension.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Grid {
    /// The number of row tiles per head.
    pub tiles: u32,
    /// The number of splits into which split-KV divides the keys of a tile.
    pub splits: u32,
    /// The number of heads per sequence. If tiles pack the query heads of a group, this is the number of KV heads.
    pub heads: u32,
    /// The number of (head, sequence) pairs. This module calls such a pair a plane, although it is not a CubeCL plane (warp).
    pub planes: u32,
    /// The number of (head, sequence) pairs in one group of the schedule. All tiles of a group start before the tiles
    /// of the next group.
    pub together: u32,
    /// The number of cubes with work. The launch may have a few more cubes.
    pub cubes: u32,
}

/// The schedule of persistent cubes, which process more than one work item.
#[cfg(feature = "cuda")]
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Schedule {
    /// The number of work items. A work item is a tile, or a pair of tiles if `paired` is 1.
    pub items: u32,
    /// The number of launched cubes. Cube `c` processes the work items `c`, `c + launched`, `c + 2 · launched` and so
    /// on.
    pub launched: u32,
    /// 1 if a work item is a pair of mirrored tiles, such as the first and the last tile of a head. 0 if a work item is
    /// one tile.
    pub paired: u32,
}

/// The tile of one cube: the tile's index within its head, its split of the keys, its head and its sequence.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WorkTile {
    pub tile: u32,
    pub split: u32,
    pub head: u32,
    pub batch: u32,
}

/// Returns the tile of cube `index`. If `last_first` is true, cubes take the tiles of a head in descending order of the
/// tile's index, beginning with the last tile.
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

/// The tile that a persistent cube computes in one iteration of its loop.
#[cfg(feature = "cuda")]
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Assignment {
    pub work_tile: WorkTile,
    /// False if the cube has no tile in this iteration. This happens if work items are pairs of tiles and a head has an
    /// odd number of tiles. The middle tile of the head then has no partner.
    pub exists: bool,
}

/// Returns the tile that the cube computes in iteration `turn` of its loop. The tile is part of the work item `item`.
///
/// A work item may be a pair of mirrored tiles, such as the first and the last tile of a head. Under a causal mask, all
/// such pairs have equal work.
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

/// Returns the work item of iteration `turn + 1` of the cube's loop. `item` is the work item of iteration `turn`.
#[cfg(feature = "cuda")]
#[cube]
pub(crate) fn next_item(schedule: &Schedule, item: u32, turn: u32) -> u32 {
    // If a work item is a pair of tiles, the cube stays with the work item for two iterations.
    item + (1u32 - schedule.paired * (1u32 - turn % 2u32)) * schedule.launched
}

/// Returns the number of blocks of `size` rows that cover `length` rows.
#[cube]
pub(crate) fn block_count(length: i32, #[comptime] size: i32) -> i32 {
    (length + size - 1i32) / size
}
