//! Plans the splits of a backward kernel: several cubes divide the work of one tile, and each cube's share is a
//! *split*. Without splits, problems with few tiles would leave multiprocessors idle.
//!
//! Each cube of a tile processes some of the streamed blocks, and writes a partial f32 gradient to a workspace. A
//! second kernel adds the partial gradients in a fixed order, so results are bitwise equal in every run.

use super::backward_tiles::BackwardTiles;
use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use cube_kit::hopper::ASSUMED_MULTIPROCESSORS;

/// The number of splits per tile in each kernel of a backward. If the number is 1, one cube processes all blocks of a
/// tile.
///
/// A tile of keys streams the blocks of all query heads of its GQA group. The splits of this tile divide these heads.
/// If there are more splits than heads, each head gets several splits, which divide the blocks of this head. The number
/// of splits is then a multiple of the number of heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientSplits {
    /// The number of splits per tile in the kernel that computes dQ.
    pub query: usize,
    /// The number of splits per tile in the kernel that computes dK.
    pub key: usize,
    /// The number of splits per tile in the kernel that computes only dV. If the plan has no such kernel, the number is
    /// 1.
    pub value: usize,
    /// The size in bytes of the largest workspace that one of the kernels needs. The number of partial gradients in a
    /// workspace is at most twice the number of cubes that the device runs at once. Each partial gradient has the size
    /// of one tile's gradient. For tiles of 128 × 256 elements on 132 multiprocessors with one cube each, a workspace
    /// takes at most 34 MB.
    pub workspace: usize,
}

/// The largest number of waves of cubes in a launch with split tiles. A wave is the number of cubes that the device
/// runs at once.
pub(crate) const MOST_ROUNDS: usize = 2;

/// If a tile is split, the smallest number of blocks per split.
const LEAST_BLOCKS: usize = 8;

/// The time that each split adds, in units of the time that one block takes. For each split, the gradient kernel writes
/// one partial gradient, and a second kernel reads this partial gradient.
const BLOCKS_OF_A_SPLIT: usize = 4;

impl GradientSplits {
    /// Plans the number of splits for each kernel of a backward.
    pub(crate) fn new<T: BackwardTiles>(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        query: &T,
        key: &T,
        value: Option<&T>,
    ) -> Self {
        let of = |tiles: &T| splits(problem, device, tiles);
        let bytes = |tiles: &T, splits: usize| match splits {
            1 => 0,
            _ => splits * gradient_bytes(problem, tiles),
        };
        let [query_splits, key_splits] = [query, key].map(of);
        let value_splits = value.map_or(1, of);
        let workspaces = [
            bytes(query, query_splits),
            bytes(key, key_splits),
            value.map_or(0, |tiles| bytes(tiles, value_splits)),
        ];
        Self {
            query: query_splits,
            key: key_splits,
            value: value_splits,
            workspace: workspaces.into_iter().max().unwrap_or_default(),
        }
    }
}

/// Returns the number of bytes that the gradients of a kernel take in f32.
fn gradient_bytes<T: BackwardTiles>(problem: &AttentionProblem, tiles: &T) -> usize {
    let (heads, length) = match tiles.side() {
        Side::Queries => (problem.q_heads, problem.q_len),
        Side::Keys => (problem.kv_heads, problem.kv_len),
    };
    let width = |summed: bool, width: usize| if summed { width } else { 0 };
    let sums = tiles.sums();
    let width =
        width(sums.has_q_or_k(), problem.head_dim) + width(sums.has_values(), problem.value_dim);
    size_of::<f32>() * problem.batch * heads * length * width
}

/// Returns the number of splits for one kernel. The function estimates the kernel's time for each number of splits. It
/// returns the smallest number with an estimate at most 5 % above the shortest.
fn splits<T: BackwardTiles>(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    tiles: &T,
) -> usize {
    // With segments (packed documents), a tile streams only the blocks of its own documents. The plan does not know how
    // many blocks these are, so it does not split the tile.
    if problem.segments {
        return 1;
    }
    let multiprocessors = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS);
    let cubes = multiprocessors * tiles.cubes_per_multiprocessor(device.shared_memory);
    let (planes, length, heads, seen) = match tiles.side() {
        Side::Queries => (
            problem.batch * problem.q_heads,
            problem.q_len,
            1,
            problem.visible_keys(tiles.rows()),
        ),
        Side::Keys => (
            problem.batch * problem.kv_heads,
            problem.kv_len,
            problem.group().max(1),
            problem.visible_queries(tiles.rows()),
        ),
    };
    let blocks = seen.div_ceil(tiles.columns());
    best_splits(planes * length.div_ceil(tiles.rows()), heads, blocks, cubes)
}

/// Returns the number of splits per tile. There are `tiles` tiles, and the device runs `cubes` cubes at once. Each tile
/// streams `heads` heads with `blocks` blocks each.
fn best_splits(tiles: usize, heads: usize, blocks: usize, cubes: usize) -> usize {
    let visits = heads * blocks;
    if tiles == 0 || tiles >= cubes || visits < 2 * LEAST_BLOCKS {
        return 1;
    }
    let most = MOST_ROUNDS * cubes / tiles;
    let by_heads = (1..=heads)
        .filter(|splits| heads.div_ceil(heads.div_ceil(*splits)) == *splits)
        .map(|splits| (splits, heads.div_ceil(splits) * blocks));
    let by_blocks = (2..=blocks.min(most / heads))
        .filter(|splits| blocks.div_ceil(blocks.div_ceil(*splits)) == *splits)
        .map(|splits| (splits * heads, blocks.div_ceil(splits)));
    let times: Vec<_> = by_heads
        .chain(by_blocks)
        .filter(|(splits, each)| *splits <= most && (*splits == 1 || *each >= LEAST_BLOCKS))
        .map(|(splits, each)| {
            let beside = if splits == 1 { 0 } else { BLOCKS_OF_A_SPLIT };
            (splits, (tiles * splits).div_ceil(cubes) * (each + beside))
        })
        .collect();
    let best = times.iter().map(|(_, time)| *time).min().unwrap_or(visits);
    // If splits save less than a third of the time, no tile is split. The time to write and read the workspace would
    // exceed the saving.
    if 3 * best > 2 * visits {
        return 1;
    }
    let near = times.iter().find(|(_, time)| time * 20 <= best * 21);
    near.map_or(1, |(splits, _)| *splits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that tiles are split if there are too few tiles to fill the device. If the tiles already fill the device,
    /// they must not be split.
    #[test]
    fn best_splits_few_tiles_fill_the_device() {
        for (tiles, heads, blocks, expected) in [
            // One tile of 64 keys streams eight query heads, each with 65,536 queries in blocks of 80.
            (1, 8, 820, 128),
            (8, 1, 820, 16),
            // Eight heads have one query each, over 131,072 keys in blocks of 128.
            (8, 1, 1024, 16),
            // The next cases have at least 132 tiles, the number of cubes that the device runs at once, so no tile is split.
            (132, 8, 820, 1),
            (133, 1, 10_000, 1),
            (100_000, 8, 820, 1),
            // In the next cases, no tile is split. Either splits would save too little time, or a tile has too few
            // blocks, or there is no tile or block at all.
            (128, 1, 26, 1),
            (1, 1, 15, 1),
            (0, 1, 820, 1),
            (1, 1, 0, 1),
        ] {
            let splits = best_splits(tiles, heads, blocks, 132);
            assert_eq!(splits, expected, "{tiles} × {heads} × {blocks}");
        }
    }

    /// Checks for many shapes that every split has at least one block, and that the number of tiles times the number of
    /// splits is bounded.
    #[test]
    fn best_splits_any_shape_divides_evenly_enough() {
        for tiles in 1..140 {
            for heads in [1, 2, 3, 5, 7, 8, 12, 71] {
                for blocks in [1, 2, 9, 16, 17, 100, 821, 16_384] {
                    let splits = best_splits(tiles, heads, blocks, 132);
                    let context = format!("{tiles} × {heads} × {blocks}: {splits}");
                    assert!(tiles * splits <= MOST_ROUNDS * 132, "{context}");
                    let head_splits = splits.min(heads);
                    assert!(splits.is_multiple_of(head_splits), "{context}");
                    let each = heads.div_ceil(head_splits);
                    assert!(each * (head_splits - 1) < heads, "{context}");
                    let block_splits = splits / head_splits;
                    let each = blocks.div_ceil(block_splits);
                    assert!(each * (block_splits - 1) < blocks, "{context}");
                }
            }
        }
    }
}
