//! The division of a problem among cubes (thread blocks), for engines on matrix units. The module chooses the heads per
//! tile, the number of key splits (split-KV), the order of the heads, and the kernels of a backward.

mod backward_tiles;
mod gradient_splits;
mod limits;

pub use self::backward_tiles::BackwardTiles;
pub use self::gradient_splits::GradientSplits;
#[cfg(test)]
pub(crate) use self::limits::NARROWEST;
pub(crate) use self::limits::check_sizes;
use crate::auxiliary::mask_bits::plan::check_mask;
use crate::engine::bias_gradient::plan::BiasGradientPlan;
use crate::engine::table_gradient::plan::TableGradientPlan;
#[cfg(feature = "cuda")]
use crate::math::side::{Side, Sums};
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;
use crate::types::request::{BackwardRequest, Layouts, Operands, Pass};

/// The largest number of bytes of keys and values that the tiles in flight may read together under a causal mask. More
/// bytes would not stay in the L2 cache.
const CACHE_BYTES: usize = 34 << 20;

/// The smallest number of key blocks per split in a forward with many query rows. For decoding, see
/// [`BLOCKS_OF_FEW_ROWS`].
const BLOCKS_PER_SPLIT: usize = 2;

/// Returns the number of query heads of a GQA group that are packed into a tile of `rows` rows.
pub(crate) fn heads_of_tile(problem: &AttentionProblem, rows: usize) -> usize {
    // Share a tile among heads only if at least two heads fit the tile. A tile with one head is the usual tile.
    match rows / problem.q_len.max(1) {
        0 | 1 => 1,
        heads => heads.min(problem.group().max(1)),
    }
}

/// The number of query tiles of a forward, and the number of heads whose tiles are in flight at the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryTiles {
    /// The number of tiles over all heads and sequences.
    pub all: usize,
    /// The number of heads whose tiles are in flight at the same time.
    pub together: usize,
}

/// Counts the query tiles of a forward. A tile has `rows` rows, which hold queries from `heads` heads.
pub(crate) fn query_tiles(problem: &AttentionProblem, rows: usize, heads: usize) -> QueryTiles {
    let group = problem.group().max(1);
    let (planes, each, sharing) = match heads {
        1 => (
            problem.batch * problem.q_heads,
            problem.q_len.div_ceil(rows),
            group,
        ),
        heads => (problem.batch * problem.kv_heads, group.div_ceil(heads), 1),
    };
    QueryTiles {
        all: planes * each,
        together: together(
            problem,
            bytes_of_rows(problem, problem.kv_len),
            sharing,
            planes,
        ),
    }
}

/// Returns the number of key splits (split-KV). There are `tiles` query tiles of `rows` rows, and blocks of `keys`
/// keys. `cubes` is the number of cubes that the device runs at once. The keys are split only if `cubes` is at least
/// `2 · tiles`.
pub(crate) fn splits(
    problem: &AttentionProblem,
    [rows, keys]: [usize; 2],
    tiles: usize,
    cubes: usize,
) -> usize {
    let blocks = problem
        .visible_keys(rows)
        .div_ceil(keys)
        .div_ceil(BLOCKS_PER_SPLIT);
    (cubes / tiles.max(1)).clamp(1, blocks.max(1))
}

/// The largest number of waves of cubes in a launch with split keys. A wave is the number of cubes that the device runs
/// at once. If a launch may have several waves, the plan can choose a number of splits that nearly fills the last wave.
const MOST_ROUNDS: usize = 4;

/// The smallest number of key blocks per split in decoding. With the value 1, Gemma 4 E2B on an H200 decoded 495
/// tokens/s at a context of 2,048 tokens, and 488 tokens/s at 8,192 tokens. With the value 2, the model decoded 485
/// tokens/s at both context lengths.
const BLOCKS_OF_FEW_ROWS: usize = 1;

/// The time to start and end a cube, in units of the time that one key block takes. With the value 2, Gemma 4 E2B on an
/// H200 decoded 495 tokens/s at a context of 2,048 tokens, and 488 tokens/s at 8,192 tokens. With the value 1 here and
/// the value 2 for [`BLOCKS_OF_FEW_ROWS`], the model decoded 488 tokens/s at both context lengths.
const BLOCKS_OF_A_CUBE: usize = 2;

/// Returns the number of key splits (split-KV) for a launch with few query rows. The function estimates the launch's
/// time for each number of splits. It returns the smallest number with an estimate at most 5 % above the shortest.
/// `cubes` is the number of cubes that the device runs at once.
pub(crate) fn num_splits_heuristic(
    problem: &AttentionProblem,
    [rows, keys]: [usize; 2],
    tiles: usize,
    cubes: usize,
) -> usize {
    let blocks = problem.visible_keys(rows).div_ceil(keys).max(1);
    let tiles = tiles.max(1);
    let most = blocks
        .div_ceil(BLOCKS_OF_FEW_ROWS)
        .min((MOST_ROUNDS * cubes / tiles).max(1));
    let time = |splits: usize| {
        (tiles * splits).div_ceil(cubes.max(1)) * (blocks.div_ceil(splits) + BLOCKS_OF_A_CUBE)
    };
    let best = (1..=most).map(time).min().unwrap_or_default();
    let is_near = |splits: &usize| time(*splits) * 20 <= best * 21;
    (1..=most).find(is_near).unwrap_or(1)
}

/// Returns the total size in bytes of the two tensors that a kernel streams for one head, such as K and V. Each of the
/// two tensors has `rows` rows in half precision.
fn bytes_of_rows(problem: &AttentionProblem, rows: usize) -> usize {
    2 * rows * (problem.head_dim + problem.value_dim)
}

/// The largest number of heads whose tiles are in flight at the same time, for problems with segments or intervals of
/// visible keys. A GPU runs more than a hundred CTAs at once. If these CTAs have tiles of at most 32 heads, several
/// CTAs read the operands of the same head. The L2 cache then holds these operands.
const HEADS_WITH_BOUNDS: usize = 32;

/// If the head sizes of K and V add up to at most this number, the tiles of [`HEADS_WITH_BOUNDS`] heads are in flight
/// at the same time. The operands of that many wider heads would not fit the L2 cache.
const COLUMNS_WITH_BOUNDS: usize = 512;

/// Returns the number of heads whose tiles are in flight at the same time. `planes` is the number of heads, counted
/// over all sequences.
///
/// Each group of `sharing` heads reads the same `bytes` bytes of operands. Under a causal mask without segments and
/// intervals, the operands of all heads in flight must fit the L2 cache. With segments or intervals, this holds only
/// for heads wider than [`COLUMNS_WITH_BOUNDS`]. With no causal mask, no segments and no intervals, the tiles of one
/// head run after the tiles of the previous head.
///
/// With segments or intervals of visible keys, the tiles of a head differ in work. If the heads ran one after another,
/// only the long tiles of the last head would still run at the end. On an H200 (2026-11-28), intervals for image blocks
/// of 256 tokens make causal attention slower by a factor. At head size 256, this factor is 1.19 with one head in
/// flight, and 1.08 with all 16 heads in flight. At head size 512, it is 1.15 with one head in flight, and 1.21 with
/// all 8 heads in flight.
fn together(problem: &AttentionProblem, bytes: usize, sharing: usize, planes: usize) -> usize {
    if problem.has_bounds() && problem.head_dim + problem.value_dim <= COLUMNS_WITH_BOUNDS {
        return HEADS_WITH_BOUNDS.clamp(1, planes.max(1));
    }
    if problem.causal.is_none() && !problem.has_bounds() {
        return 1;
    }
    (CACHE_BYTES / bytes.max(1) * sharing).clamp(sharing.min(planes.max(1)), planes.max(1))
}

/// The plan of a backward's kernels. `T` is the type that describes the tiles of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPlan<T> {
    /// The tiles of the kernel that computes dQ. Each CTA of this kernel keeps a tile of queries.
    pub query: T,
    /// The tiles of the kernel that computes dK. This kernel also computes dV, unless the field `value` is `Some`.
    pub key: T,
    /// The tiles of a kernel that computes only dV, or `None` if the kernel of `key` computes dK and dV.
    pub value: Option<T>,
    /// The number of query heads whose tiles are in flight at the same time. Heads of different sequences count
    /// separately.
    pub queries_together: usize,
    /// The number of key heads whose tiles are in flight at the same time. Heads of different sequences count
    /// separately.
    pub keys_together: usize,
    /// The number of splits per tile in each kernel of the backward.
    pub splits: GradientSplits,
    /// The number of elements that one load reads in the kernel that computes delta. This kernel reads the output and
    /// the gradient of the output.
    pub vector: usize,
    /// The plan of the bias gradient, or `None` if the problem has no bias.
    pub bias: Option<BiasGradientPlan>,
    /// The plan of the gradient of the score mod's table, or `None` if no table has a gradient.
    pub table: Option<TableGradientPlan>,
    /// The operands that must be copied before the kernels run. In a copy, each row is aligned to 16 bytes and consists
    /// of whole 16-byte vectors.
    pub copies: Operands,
}

impl<T: BackwardTiles> BackwardPlan<T> {
    /// Plans a backward whose kernels have the given tiles.
    pub(crate) fn new(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
        (query, key, value): (T, T, Option<T>),
    ) -> Result<Self, Refusal> {
        // If an operand's rows are not aligned to 16 bytes, the operand is copied to aligned rows before the kernel
        // runs. Every operand therefore allows vector loads.
        let readable = Layouts {
            vectors: true,
            ..layouts
        };
        let vector = readable.vector(problem);
        let kernels = [Some(query), Some(key), value].into_iter().flatten();
        let packed = kernels.map(|tiles| (tiles.side(), tiles.rows(), tiles.columns()));
        check_mask(problem, packed)?;
        let group = problem.group().max(1);
        Ok(Self {
            query,
            key,
            value,
            queries_together: together(
                problem,
                bytes_of_rows(problem, problem.kv_len),
                group,
                problem.batch * problem.q_heads,
            ),
            keys_together: together(
                problem,
                bytes_of_rows(problem, problem.q_len) * group,
                1,
                problem.batch * problem.kv_heads,
            ),
            splits: GradientSplits::new(problem, device, &query, &key, value.as_ref()),
            vector,
            bias: BiasGradientPlan::on_matrix_units(problem, device, vector)?,
            table: TableGradientPlan::on_matrix_units(problem, device, vector)?,
            copies: layouts.tma.others(Pass::Backward),
        })
    }

    /// Returns the number of splits for the kernel whose tiles are `tiles`.
    #[cfg(feature = "cuda")]
    pub(crate) fn splits_of(&self, tiles: &T) -> usize {
        match (tiles.side(), tiles.sums()) {
            (Side::Queries, _) => self.splits.query,
            (Side::Keys, Sums::Values) => self.splits.value,
            (Side::Keys, Sums::QOrK | Sums::Both) => self.splits.key,
        }
    }

    /// Returns the tiles of each kernel that the backward must launch for the requested gradients.
    pub fn kernels(&self, request: BackwardRequest) -> Vec<T> {
        let key = request.key || (request.value && self.value.is_none());
        let value = self.value.filter(|_| request.value);
        let kernels = [
            request.query.then_some(self.query),
            key.then_some(self.key),
            value,
        ];
        kernels.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::problem;

    /// Checks the number of key splits. Few tiles and many keys give many splits, few keys give fewer splits, and many
    /// tiles give no splits.
    #[test]
    fn num_splits_heuristic_few_tiles_fill_rounds() {
        for (tiles, kv_len, expected) in [
            (1, 32_768, 256),
            (1, 1, 1),
            (1, 200, 4),
            (8, 32_768, 32),
            (128, 32_768, 2),
            (140, 32_768, 5),
            (1024, 32_768, 1),
            (100_000, 64, 1),
        ] {
            let splits = num_splits_heuristic(
                &problem([tiles, 8, 1, 1, kv_len, 128]),
                [16, 64],
                tiles,
                264,
            );
            assert_eq!(splits, expected, "{tiles} tiles, {kv_len} keys");
        }
    }
}
