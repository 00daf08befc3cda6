//! How engines on a matrix unit divide a problem among cubes: heads that share a tile, parts of the keys, heads whose tiles are in
//! flight together, and the kernels of a backward.

use crate::AttentionProblem;
use crate::device::DeviceProfile;
use crate::math::side::Side;
use crate::passes::bias_gradient::plan::BiasGradientPlan;
use crate::passes::mask_bits::plan::check_mask;
use crate::select::{BackwardRequest, Layouts, MAX_LENGTH, Operands, Pass, Refusal};

/// The narrowest operands. With one column, gradients of values erred by 2.2 times what the definition in bf16 does (H200, 140
/// queries, 270 keys): a key far from the others has most of the probability, which is rounded to half precision.
pub(crate) const NARROWEST: usize = 8;

/// Bytes of keys and values whose tiles are in flight together under a causal mask, where heads are
/// interleaved so that what starts last is short: they share the L2 cache.
const CACHE_BYTES: usize = 34 << 20;

/// Blocks of keys that a part has at least where keys are split.
const BLOCKS_PER_SPLIT: usize = 2;

/// Refuses operands that are too narrow for half precision, and sequences that are too long for positions.
pub(crate) fn check_sizes(problem: &AttentionProblem) -> Result<(), Refusal> {
    if problem.head_dim.min(problem.value_dim) < NARROWEST {
        return Err(Refusal::Narrow {
            narrowest: NARROWEST,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
        });
    }
    let length = problem.q_len.max(problem.kv_len);
    if length > MAX_LENGTH {
        return Err(Refusal::Length {
            length,
            limit: MAX_LENGTH,
        });
    }
    Ok(())
}

/// Query heads of a group that share a tile of so many rows: 1 where a tile has one head.
pub(crate) fn heads_of_tile(problem: &AttentionProblem, rows: usize) -> usize {
    // Two heads at least must fit for sharing a tile to save one.
    match rows / problem.q_len.max(1) {
        0 | 1 => 1,
        heads => heads.min(problem.group().max(1)),
    }
}

/// The tiles of a forward's queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryTiles {
    /// Of all heads and sequences.
    pub all: usize,
    /// Heads whose tiles alternate.
    pub together: usize,
}

/// The tiles of so many rows, which `heads` heads share.
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

/// Parts of the keys, where there are fewer `tiles` of so many rows than cubes that run at once.
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

/// Rounds of cubes that run at once, up to which keys are split to fill the last one.
const MOST_ROUNDS: usize = 4;

/// Blocks of a part of the keys of few rows, at least. A token of E2B's shapes on an H200, at 2,048 and 8,192 tokens of context: 495 and 488 tokens/s
/// with one, 485 and 485 with two.
const BLOCKS_OF_FEW_ROWS: usize = 1;

/// Blocks in whose time a cube begins and ends. With one instead, and parts of two, 488 and 488 tokens/s.
const BLOCKS_OF_A_CUBE: usize = 2;

/// Parts of the keys of few rows, whose blocks take the time that their copies take: the fewest by which all rounds of `cubes` cubes
/// together take hardly longer than by any other number.
pub(crate) fn splits_in_rounds(
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

/// Bytes of so many rows of both operands that a head's tiles pass over.
fn bytes_of_rows(problem: &AttentionProblem, rows: usize) -> usize {
    2 * rows * (problem.head_dim + problem.value_dim)
}

/// Heads, of `planes`, whose tiles alternate: their operands, `bytes` for every `sharing` of them, fit the cache together. Where all tiles
/// are equally long, a head's own come one after the other.
fn together(problem: &AttentionProblem, bytes: usize, sharing: usize, planes: usize) -> usize {
    if problem.causal.is_none() {
        return 1;
    }
    (CACHE_BYTES / bytes.max(1) * sharing).clamp(sharing.min(planes.max(1)), planes.max(1))
}

/// The tiles of a backward's kernel, which hold rows of one side and pass over blocks of the other.
pub trait HeldTiles: Copy {
    /// What the rows are.
    fn side(&self) -> Side;

    /// Rows of a tile.
    fn rows(&self) -> usize;

    /// Rows of a block of the other side.
    fn columns(&self) -> usize;
}

/// The kernels of a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPlan<T> {
    /// Holds queries, and sums their gradient.
    pub query: T,
    /// Holds keys, and sums their gradient; the values' too, if these have no kernel of their own.
    pub key: T,
    /// Holds keys, and sums the values' gradient.
    pub value: Option<T>,
    /// Heads of queries, counted through the sequences, whose tiles are in flight together.
    pub queries_together: usize,
    /// Heads of keys likewise.
    pub keys_together: usize,
    /// Elements of a load of the queries' terms.
    pub vector: usize,
    /// The bias's gradient, if there is one.
    pub bias: Option<BiasGradientPlan>,
    /// Operands that are copied first, to rows of whole pieces of 16 bytes.
    pub copies: Operands,
}

impl<T: HeldTiles> BackwardPlan<T> {
    /// With tiles of queries, of keys, and of values where these have a kernel of their own.
    pub(crate) fn new(
        problem: &AttentionProblem,
        device: &DeviceProfile,
        layouts: Layouts,
        (query, key, value): (T, T, Option<T>),
    ) -> Result<Self, Refusal> {
        // Rows that can be copied by pieces, copied before or not, can be read in vectors of four where these divide them.
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
            vector,
            bias: BiasGradientPlan::on_matrix_units(problem, device, vector)?,
            copies: layouts.tma.others(Pass::Backward),
        })
    }

    /// The kernels that are launched for the gradients asked for.
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

    /// As many parts as fill the card once or a few times, fewer where keys are few, and one where tiles fill it.
    #[test]
    fn parts_fill_rounds() {
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
            let splits = splits_in_rounds(
                &problem([tiles, 8, 1, 1, kv_len, 128]),
                [16, 64],
                tiles,
                264,
            );
            assert_eq!(splits, expected, "{tiles} tiles, {kv_len} keys");
        }
    }
}
