//! Plans the kernels of the `wgmma` engine: the tiles, and the layout of shared memory.

mod gradient;
mod tiles;

use crate::auxiliary::mask_bits::plan::check_mask;
use crate::engine::tiling::{check_sizes, heads_of_tile, query_tiles, splits};
use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::{Feature, Refusal};
use crate::types::request::{Layouts, Operands, Pass};
use cube_kit::hopper::ASSUMED_MULTIPROCESSORS;
use cube_kit::nvidia::Half;

pub use crate::math::side::Sums;
pub(super) use gradient::backward;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use gradient::gradient_tiles;
pub use gradient::{
    WgmmaBackwardPlan, WgmmaGradientSplitDTiles, WgmmaGradientSplitMTiles, WgmmaGradientTiles,
};
#[cfg(feature = "cuda")]
pub(crate) use tiles::box_rows;
pub use tiles::{
    ChunkedProduct, ChunkedScores, OutputShape, RingShape, WgmmaForwardTiles, WgmmaSplitDTiles,
    WgmmaSplitMTiles,
};

/// The plan of a forward: the kernel's tiles, and the order in which CTAs process them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaForwardPlan {
    /// The tiles of the kernel.
    pub tiles: WgmmaForwardTiles,
    /// The number of query heads that share a tile, all from one GQA group.
    pub heads: usize,
    /// The number of splits of the keys (split-KV). With 1 split, the kernel writes the final output, and no second
    /// kernel combines partial outputs.
    pub splits: usize,
    /// The number of heads whose tiles are in flight at the same time. Heads of different sequences count separately.
    /// The number is 1 if the problem has no causal mask, no segments and no key intervals. Otherwise the plan limits
    /// the number so that the operands of these heads stay in the L2 cache.
    pub together: usize,
    /// The assignment of tiles to CTAs.
    pub scheduler: Scheduler,
    /// The operands whose layout TMA cannot read. Before the kernel starts, these operands are copied to a layout that
    /// TMA can read.
    pub copies: Operands,
}

/// The assignment of tiles to CTAs.
///
/// A *persistent* CTA processes several tiles. Such a CTA loads the first keys of its next tile while it finishes its
/// current tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheduler {
    /// Each CTA processes one tile. The tiles with the most work come first.
    SingleTile,
    /// A fixed number n of CTAs. CTA i processes the tiles i, i + n, i + 2n, ….
    StaticPersistent(usize),
    /// A fixed number n of CTAs. CTA i processes the pairs i, i + n, i + 2n, …. A pair consists of the k-th tile from
    /// the start of the sequence and the k-th tile from its end. Under a causal mask, all pairs therefore have equal
    /// work.
    StaticPersistentPairs(usize),
    /// A fixed number of CTAs. Each CTA takes the next free tile from a counter in global memory, because tiles differ in
    /// work.
    DynamicPersistent(usize),
}

/// The bytes of the scheduler's mailbox in shared memory: two messages, each with one word and two barriers.
pub(crate) const MAILBOX_BYTES: usize = 48;

/// One entry of the split-M table: the parameters that determine a [`WgmmaSplitMTiles`].
struct SplitMShape {
    /// The largest head size of Q and K that this entry serves.
    head_dim: usize,
    value_dim: usize,
    warpgroups: usize,
    keys: usize,
    stages: usize,
    ordering: Ordering,
    /// Two sizes for problems whose biases TMA copies to shared memory: the number of keys in a block, and the number
    /// of stages for blocks of biases.
    biased: [usize; 2],
}

/// The problems in which warpgroups take turns to issue their wgmma (ping-pong): see [`WgmmaSplitMTiles::orders_warpgroups`].
#[derive(Clone, Copy)]
enum Ordering {
    Always,
    /// The warpgroups take turns, except under a causal mask, where taking turns is slower. With dropout, they always
    /// take turns: on an H200 at head size 128 in bf16, a forward with dropout then takes 1.37 instead of 1.48 times as
    /// long as one without.
    UnlessCausal,
    /// The warpgroups take turns, except with a mask or a bias, where taking turns is slower.
    UnlessMasked,
}

const fn split_m_shape(
    head_dim: usize,
    value_dim: usize,
    warpgroups: usize,
    keys: usize,
    stages: usize,
    ordering: Ordering,
    biased: [usize; 2],
) -> SplitMShape {
    SplitMShape {
        head_dim,
        value_dim,
        warpgroups,
        keys,
        stages,
        ordering,
        biased,
    }
}

/// The split-M table. A problem takes the first entry whose largest head sizes are not below the problem's head sizes.
/// The comments give TFLOP/s on one H200 in bf16, at 4,096 queries and keys (docs/forward-split-m.md).
const SPLIT_M: &[SplitMShape] = &[
    // At head size 64 under a causal mask, the tile of the entry below reaches 463 TFLOP/s on an H200. Variants of this
    // tile under a causal mask, in TFLOP/s: 449 with two stages; 414 with blocks of 80 keys; 426 with blocks of 112
    // keys; 460 with blocks of 128 keys; 450 without ping-pong.
    split_m_shape(64, 64, 3, 96, 3, Ordering::Always, [96, 2]),
    // At head size 128 on an H200, the tile of the entry below reaches 649 TFLOP/s with a causal mask, 691 without, and
    // 460 with a bias. Variants of this tile under a causal mask, in TFLOP/s: 629 with ping-pong; 622 with blocks of
    // 112 keys; 618 with blocks of 144 keys. Without a mask, blocks of 144 keys reach 697 TFLOP/s. With a bias, blocks
    // of 96 keys and two stages reach 461 TFLOP/s.
    split_m_shape(128, 128, 2, 128, 2, Ordering::UnlessCausal, [128, 1]),
    split_m_shape(192, 128, 2, 128, 2, Ordering::UnlessCausal, [96, 1]),
    split_m_shape(192, 192, 2, 112, 2, Ordering::Always, [80, 1]),
    // At head size 256 on an H200 (2026-11-29), the tile of the entry below reaches 799 TFLOP/s without a mask, 728 with
    // a causal mask, and 601 with a window of 1,024 keys. Blocks of 80 keys reach 789, 706 and 563 TFLOP/s. With blocks
    // of 80 keys, no ping-pong is 1 % slower. With a bias, one stage and two stages reach the same speed.
    split_m_shape(256, 256, 2, 64, 2, Ordering::UnlessMasked, [64, 2]),
];

/// The split-D table. Each entry has the largest head size that it serves, and the number of ring stages that fit in
/// shared memory beside the queries.
const SPLIT_D: &[(usize, usize)] = &[(512, 8), (WIDEST_DOTS, 7)];

/// The largest head size of Q and K for which shared memory has room for a ring beside the queries.
const WIDEST_DOTS: usize = 576;

/// The largest number of columns of V for which two warpgroups can hold the output in registers.
const WIDEST_VALUES: usize = 512;

fn multiprocessors(device: &DeviceProfile) -> usize {
    device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS)
}

/// Checks that this engine supports the device and the problem. Returns the half-precision type of the operands.
fn check(problem: &AttentionProblem, device: &DeviceProfile) -> Result<Half, Refusal> {
    device.require(Feature::Wgmma)?;
    device.require(Feature::Tma)?;
    let half = Half::of(problem.dtype).ok_or(Refusal::NotHalf(problem.dtype))?;
    check_sizes(problem)?;
    Ok(half)
}

/// Plans the forward of `problem`, or returns the reason why the engine refuses the problem.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<WgmmaForwardPlan, Refusal> {
    let half = check(problem, device)?;
    let tiles = |loads_bias_by_tma| {
        let choice = ForwardChoice {
            causal: problem.causal.is_some(),
            masked: problem.mask.is_some() || problem.bias.is_some() || problem.mask_mod.is_some(),
            dropout: problem.dropout.is_some(),
            mask_block: problem.has_block_mask().then_some(problem.mask_block[1]),
            loads_bias_by_tma,
        };
        forward_tiles([problem.head_dim, problem.value_dim], half, choice).ok_or(Refusal::Width {
            widest_head: WIDEST_DOTS,
            widest_value: WIDEST_VALUES,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
        })
    };
    let heads = heads_of_tile(problem, tiles(false)?.rows());
    let tiles = tiles(heads == 1 && layouts.tma_bias && has_box_of_biases(problem))?;
    let mailbox = if problem.has_bounds() {
        MAILBOX_BYTES
    } else {
        0
    };
    let shared_memory = tiles.shared_memory() + mailbox;
    if shared_memory > device.shared_memory || tiles.units() > device.units_per_cube {
        return Err(Refusal::Tiles {
            width: problem.value_dim,
            shared_memory: device.shared_memory,
            units: device.units_per_cube,
        });
    }

    let query_tiles = query_tiles(problem, tiles.rows(), heads);
    check_mask(problem, [(Side::Queries, tiles.rows(), tiles.keys())])?;
    let splits = splits(
        problem,
        [tiles.rows(), tiles.keys()],
        query_tiles.all,
        multiprocessors(device),
    );
    Ok(WgmmaForwardPlan {
        tiles,
        heads,
        splits,
        together: query_tiles.together,
        scheduler: scheduler(problem, device, query_tiles.all, splits),
        copies: layouts.tma.others(Pass::Forward),
    })
}

/// True if TMA can copy a tile's biases. The bias must have one element for each pair of a query and a key, in the
/// precision of the queries.
pub(crate) fn has_box_of_biases(problem: &AttentionProblem) -> bool {
    // With a score mod or a mask mod, TMA copies no biases. The kernel would add the biases from TMA to S before it
    // calls the score mod. But the score mod must get the score without the bias.
    let bias = problem.bias.filter(|_| !problem.has_code());
    bias.is_some_and(|([_, _, queries, keys], dtype)| {
        queries == problem.q_len && keys == problem.kv_len && dtype == problem.dtype
    })
}

/// The properties of a problem on which the tiles of its forward depend, beside the head sizes.
#[derive(Clone, Copy, Default)]
pub(crate) struct ForwardChoice {
    pub causal: bool,
    /// True if the problem has a mask, a mask mod or a bias.
    pub masked: bool,
    pub dropout: bool,
    /// The number of keys per element of a block mask, or `None` without a block mask.
    pub mask_block: Option<usize>,
    pub loads_bias_by_tma: bool,
}

/// The number of keys in a block for problems with a block mask, if the table's block would cross the bounds of the
/// mask's elements. A block that crosses a bound is read for both elements.
const MASK_BLOCK_KEYS: usize = 64;

/// Returns the tiles of a forward, or `None` if no table entry is large enough.
pub(crate) fn forward_tiles(
    [head_dim, value_dim]: [usize; 2],
    half: Half,
    choice: ForwardChoice,
) -> Option<WgmmaForwardTiles> {
    let crosses_bounds = |keys: usize| {
        let block = choice.mask_block;
        block.is_some_and(|block| {
            !block.is_multiple_of(keys) && block.is_multiple_of(MASK_BLOCK_KEYS)
        })
    };
    let split_m = SPLIT_M
        .iter()
        .find(|shape| head_dim <= shape.head_dim && value_dim <= shape.value_dim)
        .map(|shape| {
            let [keys, bias_stages] = match choice.loads_bias_by_tma {
                true => shape.biased,
                false if crosses_bounds(shape.keys) => [MASK_BLOCK_KEYS, 0],
                false => [shape.keys, 0],
            };
            WgmmaForwardTiles::SplitM(WgmmaSplitMTiles {
                head_dim,
                value_dim,
                half,
                warpgroups: shape.warpgroups,
                keys,
                stages: shape.stages,
                bias_stages,
                orders_warpgroups: match shape.ordering {
                    Ordering::Always => true,
                    Ordering::UnlessCausal => !choice.causal || choice.dropout,
                    Ordering::UnlessMasked => !choice.masked,
                },
            })
        });
    split_m.or_else(|| {
        SPLIT_D
            .iter()
            .find(|(widest, _)| head_dim <= *widest && value_dim <= WIDEST_VALUES)
            .map(|(_, stages)| {
                WgmmaForwardTiles::SplitD(WgmmaSplitDTiles {
                    head_dim,
                    value_dim,
                    half,
                    stages: *stages,
                })
            })
    })
}

/// Chooses the assignment of tiles to CTAs.
///
/// With segments or intervals of visible keys and without split-KV, CTAs are persistent and take tiles from a counter.
/// In all other cases, CTAs are persistent only if there are more tiles (counted once per split) than multiprocessors.
/// Also, all work items must have equal work, or many must have none because of `query_lengths`. A persistent CTA only
/// writes zeros for a tile without queries, while a CTA of its own would first have to start. A work item is a tile, or
/// a pair of a tile and its mirror image in the sequence.
fn scheduler(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    tiles: usize,
    splits: usize,
) -> Scheduler {
    let multiprocessors = multiprocessors(device);
    if problem.has_bounds() && splits == 1 {
        return Scheduler::DynamicPersistent(tiles.min(multiprocessors));
    }
    let is_uneven = problem.has_lengths() || problem.has_block_mask();
    if tiles * splits > multiprocessors && problem.query_lengths {
        return Scheduler::StaticPersistent(multiprocessors);
    }
    if tiles * splits <= multiprocessors || is_uneven {
        return Scheduler::SingleTile;
    }
    let windowed = problem
        .window_left
        .is_some_and(|left| left <= problem.kv_len / 2);
    match problem.causal {
        None => Scheduler::StaticPersistent(multiprocessors),
        Some(_) if windowed => Scheduler::SingleTile,
        Some(_) if problem.q_len <= problem.kv_len => {
            Scheduler::StaticPersistentPairs(multiprocessors)
        }
        Some(_) => Scheduler::SingleTile,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that tiles exist for up to 576 columns of Q and K and up to 512 columns of V. The tiles must fit in a Hopper
    /// GPU's shared memory.
    #[test]
    fn forward_tiles_of_every_width_fit_shared_memory() {
        let widths =
            (1..=576).flat_map(|head_dim| (1..=512).map(move |value_dim| (head_dim, value_dim)));
        for (head_dim, value_dim) in widths {
            for (biased, mask_block) in [(false, None), (true, None), (false, Some(128))] {
                let choice = ForwardChoice {
                    masked: biased || mask_block.is_some(),
                    mask_block,
                    loads_bias_by_tma: biased,
                    ..ForwardChoice::default()
                };
                let tiles = forward_tiles([head_dim, value_dim], Half::Bf16, choice);
                let tiles = tiles.unwrap_or_else(|| panic!("no tiles for {head_dim}/{value_dim}"));
                assert!(
                    tiles.shared_memory() + MAILBOX_BYTES <= 232_448,
                    "{tiles:?}"
                );
                if let WgmmaForwardTiles::SplitM(rows) = tiles {
                    assert!(
                        rows.keys.is_multiple_of(16) && rows.keys <= 128,
                        "{tiles:?}"
                    );
                    assert!(rows.rows() <= 256, "{tiles:?}");
                }
            }
        }
    }
}
