//! Plans of the kernels over tiles, whatever the tiles are chosen from: which kernels, how keys are split, and what no device runs.

mod packing;

use crate::AttentionProblem;
use crate::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::passes::bias_gradient::plan::BiasGradientPlan;
use crate::select::{BackwardRequest, MAX_LENGTH, Pass, Refusal};
use crate::tile::tiles::UnitTiles;

pub(crate) use self::packing::Packing;

/// Tiles of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardPlan {
    /// The tiles.
    pub tiles: UnitTiles,
    /// The heads of a group share a tile.
    pub packed: bool,
    /// Parts that the keys are split into; 1 writes the output at once.
    pub splits: usize,
}

/// Tiles of a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPlan {
    /// For the query's gradient.
    pub query: UnitTiles,
    /// For the keys' and the values'.
    pub key_value: UnitTiles,
    /// One kernel gives all three gradients, with the tiles of the keys', and with the query's in so many
    /// parts; `None` where the query's has a kernel of its own.
    pub parts: Option<usize>,
    /// The bias's gradient, if there is one.
    pub bias: Option<BiasGradientPlan>,
}

/// A kernel that gives gradients of query, keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientKernel {
    /// The query's.
    Query,
    /// The keys' and the values'.
    KeyValue,
    /// As many of all three as are asked for, the query's in so many parts.
    Together {
        /// Of the query's.
        parts: usize,
    },
}

impl BackwardPlan {
    /// The kernels that are launched for the gradients asked for.
    pub fn kernels(&self, request: BackwardRequest) -> Vec<GradientKernel> {
        let pairs = request.key || request.value;
        let kernels = match self.parts {
            Some(parts) => [
                (request.query || pairs).then_some(GradientKernel::Together { parts }),
                None,
            ],
            None => [
                request.query.then_some(GradientKernel::Query),
                pairs.then_some(GradientKernel::KeyValue),
            ],
        };
        kernels.into_iter().flatten().collect()
    }
}

/// Rows up to which the heads of a group share a tile.
pub(crate) const DECODE_ROWS: usize = 32;

/// Cubes a multiprocessor that decoding splits its keys for.
const CUBES_PER_MULTIPROCESSOR: usize = 2;

/// Refuses what none of the kernels takes.
pub(crate) fn check(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    pass: Pass,
) -> Result<(), Refusal> {
    if !device.dtypes.contains(&problem.dtype) {
        return Err(Refusal::Dtype(problem.dtype));
    }
    let length = problem.q_len.max(problem.kv_len);
    if length > MAX_LENGTH {
        return Err(Refusal::Length {
            length,
            limit: MAX_LENGTH,
        });
    }
    let needed = bindings(problem, pass);
    if needed > device.bindings {
        return Err(Refusal::Bindings {
            needed,
            available: device.bindings,
        });
    }
    Ok(())
}

/// True if a key between two visible keys may be hidden, as the kernels' `ScoreKind::leaves_masked` decides.
fn has_masked(problem: &AttentionProblem) -> bool {
    problem.bias.is_some() || problem.mask.is_some() || problem.segments
}

/// Refuses what a software driver would end before its end.
fn check_iterations(needed: usize, device: &DeviceProfile) -> Result<(), Refusal> {
    if device.processors.is_some() && needed > SOFTWARE_ITERATIONS {
        return Err(Refusal::Iterations {
            needed,
            limit: SOFTWARE_ITERATIONS,
        });
    }
    Ok(())
}

/// The forward by the tiles that are chosen for few rows, of so many, or where there are none, or more rows, by the others; refused where a
/// software driver would end it before its end.
pub(crate) fn forward_by(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    few_rows: impl FnOnce(usize) -> Result<UnitTiles, Refusal>,
    tiles: impl FnOnce() -> Result<UnitTiles, Refusal>,
) -> Result<ForwardPlan, Refusal> {
    let rows = problem.q_len * problem.group();
    let decode = (rows <= DECODE_ROWS).then(|| few_rows(rows).ok()).flatten();
    let plan = match decode {
        Some(tiles) => ForwardPlan {
            tiles,
            packed: true,
            splits: splits(problem, device, &tiles),
        },
        None => ForwardPlan {
            tiles: tiles()?,
            packed: false,
            splits: 1,
        },
    };
    let blocks = problem.kv_len.div_ceil(plan.tiles.columns());
    let block = plan
        .tiles
        .block_iterations(problem.head_dim, 1, has_masked(problem));
    let needed = blocks.div_ceil(plan.splits) * block;
    check_iterations(needed, device)?;
    Ok(plan)
}

/// The plan, refused where a software driver would end it before its end.
pub(crate) fn backward_by(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    plan: BackwardPlan,
) -> Result<BackwardPlan, Refusal> {
    check_iterations(backward_iterations(problem, &plan), device)?;
    Ok(plan)
}

/// Iterations of all loops of a unit, at most, in the kernel of the backward that runs the most of them.
fn backward_iterations(problem: &AttentionProblem, plan: &BackwardPlan) -> usize {
    let BackwardPlan {
        query,
        key_value,
        parts,
        bias,
    } = plan;
    let both = problem.head_dim + problem.value_dim;
    let bias = bias.map_or(0, |bias| bias.iterations(problem));
    // One kernel for all gradients is launched as often as it takes.
    let separate = match parts {
        Some(_) => 0,
        None => {
            let query_blocks = problem.q_len.div_ceil(key_value.columns());
            let key_blocks = problem.kv_len.div_ceil(query.columns());
            let masked = has_masked(problem);
            let of_keys = query_blocks * key_value.block_iterations(both, 2, masked);
            let of_queries = key_blocks * query.block_iterations(both, 1, masked);
            of_queries.max(problem.group() * of_keys)
        }
    };
    bias.max(separate)
}

/// Parts of the keys where the heads of a group share a tile: as many as occupy the card, as far as there are blocks.
fn splits(problem: &AttentionProblem, device: &DeviceProfile, tiles: &UnitTiles) -> usize {
    let target =
        device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS) * CUBES_PER_MULTIPROCESSOR;
    let blocks = problem
        .visible_keys(problem.q_len)
        .div_ceil(tiles.columns())
        .max(1);
    (target / (problem.batch * problem.kv_heads).max(1)).clamp(1, blocks)
}

/// Buffers of the kernel that binds the most.
fn bindings(problem: &AttentionProblem, pass: Pass) -> usize {
    let shared = usize::from(problem.mask.is_some())
        + usize::from(problem.bias.is_some())
        + usize::from(problem.kv_lengths || problem.segments);
    match pass {
        // query, key, value, output, logsumexp; scales of keys and values
        Pass::Forward => {
            5 + shared + usize::from(problem.sinks.is_some()) + 2 * usize::from(problem.quantized)
        }
        // query, key, value, output's gradient, rows, and two gradients
        Pass::Backward => 7 + shared,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile::table::{SINGLE, choose};
    use burn::tensor::DType;

    /// Mesa's software Vulkan on two processor cores.
    fn software() -> DeviceProfile {
        DeviceProfile {
            processors: Some(2),
            ..crate::testing::card(32 << 10)
        }
    }

    /// The loops as the kernels of `tile/direct.rs` have them: blocks, columns by fours, rows by fours, and marked rows.
    fn loops(tiles: &UnitTiles, columns: [usize; 2], accumulated: usize, masked: bool) -> usize {
        let sums: usize = columns.iter().map(|columns| columns.div_ceil(4)).sum();
        let marks = if masked { tiles.rows } else { 0 };
        1 + sums + accumulated * (tiles.columns() / 4 + marks)
    }

    #[test]
    fn block_iterations_count_every_loop_of_direct_tiles() {
        for width in [1, 16, 32, 33, 64, 128, 256, 512, 1024] {
            let tiles = choose(SINGLE, width, 0, &software(), 4).expect("a tile of any width");
            assert!(tiles.is_direct(), "{width}: {tiles:?}");
            for masked in [false, true] {
                for (columns, accumulated) in
                    [([width, 0], 1), ([width, width], 1), ([width, width], 2)]
                {
                    let counted = tiles.block_iterations(columns.iter().sum(), accumulated, masked);
                    let loops = loops(&tiles, columns, accumulated, masked);
                    assert!(counted >= loops, "{width}, {masked}: {counted} of {loops}");
                }
            }
        }
    }

    #[test]
    fn masked_problem_near_the_loop_limit_is_refused() {
        let problem = |mask| AttentionProblem {
            dtype: DType::F32,
            mask,
            ..crate::testing::problem([1, 1, 1, 33, 47_300, 33])
        };
        let plan = |mask| {
            let tiles = || choose(SINGLE, 33, 0, &software(), 4);
            forward_by(&problem(mask), &software(), |_| tiles(), tiles)
        };
        assert!(plan(None).is_ok());
        let refused = plan(Some([1, 1, 1, 47_300]));
        assert!(
            matches!(refused, Err(Refusal::Iterations { .. })),
            "{refused:?}"
        );
    }
}
