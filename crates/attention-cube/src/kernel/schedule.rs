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

/// A cube's share of the work.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Share {
    pub tile: u32,
    pub split: u32,
    pub head: u32,
    pub batch: u32,
}

/// The share of cube `index`, tiles counted from the last if `last_first`.
#[cube]
pub(crate) fn share(grid: &Grid, index: u32, #[comptime] last_first: bool) -> Share {
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
    Share {
        tile,
        split,
        head: plane % grid.heads,
        batch: plane / grid.heads,
    }
}

/// Blocks of `size` that `length` rows fill or begin.
#[cube]
pub(crate) fn block_count(length: i32, #[comptime] size: i32) -> i32 {
    (length + size - 1i32) / size
}
