//! The order of tiles under segments and intervals of visible keys: tiles with more blocks start earlier.
//!
//! With such bounds, the tiles of a sequence differ in work, and only the device knows by how much. If long tiles
//! started last, few multiprocessors would still work at the end of the launch. Sorting by length avoids this (LPT
//! scheduling: longest processing time first).
//!
//! Tiles whose lengths have equally many digits in base 4 keep their order. Neighboring tiles, which read the same keys,
//! then run at about the same time and find these keys in the L2 cache. At the end of the launch, only the shortest
//! tiles run.
//!
//! Packed prompts of 512 to 4,096 tokens, beside equal prompts of 1,024, take longer by these factors (H200, bf16,
//! 2026-11-30, `cargo bench --bench attention -- cliffs-varlen --passes forward`):
//!
//! | order of tiles | D128 | D256 |
//! |---|---|---|
//! | from the last query to the first | 1.19 | 1.29 |
//! | by length | 1.24 | 1.23 |
//! | by the digits of the length in base 2 | 1.19 | 1.16 |
//! | by the digits of the length in base 4 | 1.18 | 1.13 |
//!
//! The backward does not use this order. It was not faster with it (D128 1.20 for 1.17, D256 1.16 both ways).
//!
//! The order is part of the packed buffer of [`crate::auxiliary::lengths`], behind the counter of claimed tiles.

use super::schedule::Grid;
use super::visibility::{BLOCK_BOUNDS, SeqLens, Structure, integer};
use cubecl::prelude::*;

/// Returns the index whose tile takes the place of the tile of `index` in the order. Both tiles have the same sequence,
/// head and split. The index must be below the number of tiles of the launch, counted once per split.
///
/// Each tile must have rows of one head, so that `grid.tiles` blocks of the packed buffer's order belong to a sequence.
/// Without segments and intervals, the function returns `index`.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(crate) fn longest_first(
    grid: &Grid,
    index: u32,
    seq_lens: &SeqLens,
    lengths_and_ids: &ComptimeOption<OwnedTensor<i32>>,
    #[comptime] structure: Structure,
) -> u32 {
    let mut result = index;
    if comptime!(structure.has_bounds()) {
        if grid.tiles > 1u32 {
            let whole = grid.together * grid.tiles * grid.splits;
            let first_plane = index / whole * grid.together;
            let together = min(grid.together, grid.planes - first_plane);
            let batch = (first_plane + index % whole % together) / grid.heads;
            // Indices of neighboring ranks are `step` apart.
            let step = together * grid.splits;
            let rank = index % whole / step;
            let order = order_at(seq_lens, grid.planes / grid.heads);
            let ordered = integer(lengths_and_ids, order + batch * grid.tiles + rank) as u32;
            result = index - rank * step + ordered * step;
        }
    }
    result
}

/// Returns the offset of the counter of claimed tiles in the packed buffer. The counter follows the bounds of the
/// blocks of keys.
#[cube]
pub(crate) fn counter_at(seq_lens: &SeqLens, batches: u32) -> u32 {
    seq_lens.key_bounds + comptime!(BLOCK_BOUNDS as u32) * batches * seq_lens.key_blocks
}

#[cube]
fn order_at(seq_lens: &SeqLens, batches: u32) -> u32 {
    counter_at(seq_lens, batches) + 1u32
}
