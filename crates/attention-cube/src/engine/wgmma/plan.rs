//! The plan of the `wgmma` engine, for NVIDIA's Hopper: tiles from tables by head size, and the shared
//! memory that they take.

mod gradient;
mod tiles;

use crate::AttentionProblem;
use crate::device::{DeviceProfile, Feature};
use crate::division::{check_sizes, heads_of_tile, query_tiles, splits};
use crate::math::side::Side;
use crate::passes::mask_bits::plan::check_mask;
use crate::select::{Layouts, Operands, Pass, Refusal};
use cube_kit::hopper::{ASSUMED_MULTIPROCESSORS, Half};

pub use crate::math::side::Sums;
pub(super) use gradient::backward;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use gradient::gradient_tiles;
pub use gradient::{BackwardPlan, GradientSplitDTiles, GradientSplitMTiles, GradientTiles};
pub use tiles::{
    ChunkedProduct, ChunkedScores, ForwardTiles, OutputShape, RingShape, SplitDTiles, SplitMTiles,
};

/// The kernel of the forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardPlan {
    /// The tiles.
    pub tiles: ForwardTiles,
    /// Query heads of a group that share a tile, one after the other; 1 where a tile has one head.
    pub heads: usize,
    /// Parts that the keys are split into; 1 writes the output at once.
    pub splits: usize,
    /// Heads, counted through the sequences, whose tiles are in flight together.
    pub together: usize,
    /// How tiles come to cubes.
    pub scheduler: Scheduler,
    /// Operands that are copied first, to rows that the copy engine can read.
    pub copies: Operands,
}

/// How tiles come to cubes. A cube that stays loads the next tile's first keys while the last one ends, but
/// nobody evens out what its tiles take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheduler {
    /// A cube a tile, and the device hands them out, the heavy ones first.
    SingleTile,
    /// This many cubes, and each takes every so many-th tile.
    StaticPersistent(usize),
    /// This many cubes, and each takes every so many-th pair of a tile and its mirror image in the sequence.
    StaticPersistentPairs(usize),
    /// This many cubes, and each takes the next tile that none has: where documents make tiles differ.
    DynamicPersistent(usize),
}

/// Bytes of shared memory by which a cube's warps learn what it has taken: two words, and two barriers for each.
pub(crate) const NOTICE_BYTES: usize = 48;

/// The part of [`SplitMTiles`] that is chosen.
struct SplitMShape {
    /// The widest keys and values it is for.
    head_dim: usize,
    value_dim: usize,
    warpgroups: usize,
    keys: usize,
    stages: usize,
    ordering: Ordering,
    /// Keys of a block where the copy engine brings biases, too, and blocks of these in shared memory.
    biased: [usize; 2],
}

/// Where warpgroups issue their products in turns: see [`SplitMTiles::orders_warpgroups`].
#[derive(Clone, Copy)]
enum Ordering {
    Always,
    /// Tiles that end in partial blocks lose more by waiting than they gain.
    UnlessCausal,
    /// So do those whose softmax has a mask or a bias to read.
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

/// Split-M, the first that is wide enough. TFLOP/s on one H200, bf16, at 4,096 queries and keys (docs/forward-split-m.md).
const SPLIT_M: &[SplitMShape] = &[
    // Causal 463 (two stages 449; 80, 112, 128 keys 414, 426, 460; without turns 450).
    split_m_shape(64, 64, 3, 96, 3, Ordering::Always, [96, 2]),
    // Causal 649 (in turns 629; 112, 144 keys 622, 618), all seen 691 (144: 697), a bias 460 (96 keys, two stages: 461).
    split_m_shape(128, 128, 2, 128, 2, Ordering::UnlessCausal, [128, 1]),
    split_m_shape(192, 128, 2, 128, 2, Ordering::UnlessCausal, [96, 1]),
    split_m_shape(192, 192, 2, 112, 2, Ordering::Always, [80, 1]),
    // All seen 788 (64 keys 796; without turns 779), a bias 534 (one stage: the same).
    split_m_shape(256, 256, 2, 80, 2, Ordering::UnlessMasked, [64, 2]),
];

/// Split-D: the widest keys, and how many stages fit beside them.
const SPLIT_D: &[(usize, usize)] = &[(512, 8), (WIDEST_DOTS, 7)];

/// The widest queries and keys that leave room for a ring.
const WIDEST_DOTS: usize = 576;

/// The widest values that two warpgroups hold by columns.
const WIDEST_VALUES: usize = 512;

fn multiprocessors(device: &DeviceProfile) -> usize {
    device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS)
}

/// The precision of the problem's operands, where the engine takes it on this device at all.
fn check(problem: &AttentionProblem, device: &DeviceProfile) -> Result<Half, Refusal> {
    device.require(Feature::Wgmma)?;
    device.require(Feature::Tma)?;
    let half = Half::of(problem.dtype).ok_or(Refusal::NotHalf(problem.dtype))?;
    check_sizes(problem)?;
    Ok(half)
}

/// The kernel of the forward of `problem`, or why there is none.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<ForwardPlan, Refusal> {
    let half = check(problem, device)?;
    let tiles = |loads_bias_by_tma| {
        forward_tiles(
            problem.head_dim,
            problem.value_dim,
            half,
            problem.causal.is_some(),
            problem.mask.is_some() || problem.bias.is_some(),
            loads_bias_by_tma,
        )
        .ok_or(Refusal::Width {
            widest_head: WIDEST_DOTS,
            widest_value: WIDEST_VALUES,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
        })
    };
    let heads = heads_of_tile(problem, tiles(false)?.rows());
    let tiles = tiles(heads == 1 && layouts.tma_bias && has_box_of_biases(problem))?;
    let notices = if problem.segments { NOTICE_BYTES } else { 0 };
    let shared_memory = tiles.shared_memory() + notices;
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
    Ok(ForwardPlan {
        tiles,
        heads,
        splits,
        together: query_tiles.together,
        scheduler: scheduler(problem, device, query_tiles.all, splits),
        copies: layouts.tma.others(Pass::Forward),
    })
}

/// Whether a tile's biases are a box: every pair of query and key has its own, in the precision of the queries.
fn has_box_of_biases(problem: &AttentionProblem) -> bool {
    problem.bias.is_some_and(|([_, _, queries, keys], dtype)| {
        queries == problem.q_len && keys == problem.kv_len && dtype == problem.dtype
    })
}

/// The tiles for operands of this width.
pub(crate) fn forward_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    causal: bool,
    masked: bool,
    loads_bias_by_tma: bool,
) -> Option<ForwardTiles> {
    let split_m = SPLIT_M
        .iter()
        .find(|shape| head_dim <= shape.head_dim && value_dim <= shape.value_dim)
        .map(|shape| {
            let [keys, bias_stages] = match loads_bias_by_tma {
                true => shape.biased,
                false => [shape.keys, 0],
            };
            ForwardTiles::SplitM(SplitMTiles {
                head_dim,
                value_dim,
                half,
                warpgroups: shape.warpgroups,
                keys,
                stages: shape.stages,
                bias_stages,
                orders_warpgroups: match shape.ordering {
                    Ordering::Always => true,
                    Ordering::UnlessCausal => !causal,
                    Ordering::UnlessMasked => !masked,
                },
            })
        });
    split_m.or_else(|| {
        SPLIT_D
            .iter()
            .find(|(widest, _)| head_dim <= *widest && value_dim <= WIDEST_VALUES)
            .map(|(_, stages)| {
                ForwardTiles::SplitD(SplitDTiles {
                    head_dim,
                    value_dim,
                    half,
                    stages: *stages,
                })
            })
    })
}

/// Cubes stay where tiles, or pairs of them, are equally heavy, or where segments come with a counter of taken ones.
fn scheduler(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    tiles: usize,
    splits: usize,
) -> Scheduler {
    let multiprocessors = multiprocessors(device);
    if problem.segments && splits == 1 {
        return Scheduler::DynamicPersistent(tiles.min(multiprocessors));
    }
    if tiles * splits <= multiprocessors || problem.kv_lengths {
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

    /// Every width up to the limit has a tile, and every tile fits a Hopper GPU's shared memory.
    #[test]
    fn every_width_has_a_tile_that_fits() {
        let widths =
            (1..=576).flat_map(|head_dim| (1..=512).map(move |value_dim| (head_dim, value_dim)));
        for (head_dim, value_dim) in widths {
            for biased in [false, true] {
                let tiles = forward_tiles(head_dim, value_dim, Half::Bf16, false, biased, biased);
                let tiles = tiles.unwrap_or_else(|| panic!("no tiles for {head_dim}/{value_dim}"));
                assert!(tiles.shared_memory() + NOTICE_BYTES <= 232_448, "{tiles:?}");
                if let ForwardTiles::SplitM(rows) = tiles {
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
