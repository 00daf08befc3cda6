//! The plans that the portable engines share: the kernels of a forward or backward, the key splits, and the refusals.

mod packing;

use crate::engine::api::DECODE_ROWS;
use crate::engine::bias_gradient::plan::BiasGradientPlan;
use crate::engine::table_gradient::plan::TableGradientPlan;
use crate::problem::AttentionProblem;
use crate::tile_ops::tiles::UnitTiles;
use crate::types::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::types::refusal::Refusal;
use crate::types::request::{BackwardRequest, MAX_LENGTH, Pass};

pub(crate) use self::packing::Packing;

/// The plan of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortableForwardPlan {
    /// The tile sizes of the forward kernel.
    pub tiles: UnitTiles,
    /// True if the query heads of a GQA group share a tile, as in decoding.
    pub packed: bool,
    /// The number of key splits (split-KV). If the number is 1, the kernel writes the output itself, and no second kernel
    /// runs.
    pub splits: usize,
}

/// The plan of a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortableBackwardPlan {
    /// The tiles of the kernel that computes the query's gradient.
    pub query: UnitTiles,
    /// The tiles of the kernel that computes the gradients of keys and values.
    pub key_value: UnitTiles,
    /// If one kernel with the tiles `key_value` computes all three gradients, the number of partial gradients of the
    /// query. `None` if a separate kernel computes the query's gradient.
    pub parts: Option<usize>,
    /// The plan of the bias gradient, or `None` if the problem has no bias.
    pub bias: Option<BiasGradientPlan>,
    /// The plan of the gradient of the score mod's table, or `None` if no table has a gradient.
    pub table: Option<TableGradientPlan>,
}

/// A kernel that computes one or several of the gradients of query, key and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientKernel {
    /// Computes the gradient of the query.
    Query,
    /// Computes the gradients of keys and values.
    KeyValue,
    /// Computes all requested gradients of query, key and value. A second kernel adds the partial gradients of the query.
    Together {
        /// The number of partial gradients of the query.
        parts: usize,
    },
}

impl PortableBackwardPlan {
    /// Returns the kernels that must be launched for the requested gradients.
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

/// The number of cubes per multiprocessor that the plan tries to reach when it splits the keys in decoding.
const CUBES_PER_MULTIPROCESSOR: usize = 2;

/// Refuses problems that no portable kernel supports: an unsupported dtype, a sequence that is too long, or too many buffers.
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

/// True if a hidden key may lie between two visible keys of a query. `ScoreKind::leaves_masked` computes the same
/// condition for the kernels.
fn has_masked(problem: &AttentionProblem) -> bool {
    problem.bias.is_some()
        || problem.mask.is_some()
        || problem.mask_mod.is_some()
        || problem.has_bounds()
}

/// Refuses a kernel whose loops exceed the iteration limit of a software driver. The driver would stop such loops silently.
fn check_iterations(needed: usize, device: &DeviceProfile) -> Result<(), Refusal> {
    if device.processors.is_some() && needed > SOFTWARE_ITERATIONS {
        return Err(Refusal::Iterations {
            needed,
            limit: SOFTWARE_ITERATIONS,
        });
    }
    Ok(())
}

/// Plans the forward. Problems with at most [`DECODE_ROWS`] query rows use the tiles that `few_rows` returns. All other
/// problems use the tiles that `tiles` returns, and so do problems that `few_rows` refuses. Plans beyond a software
/// driver's iteration limit are refused.
pub(crate) fn forward_by(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    few_rows: impl FnOnce(usize) -> Result<UnitTiles, Refusal>,
    tiles: impl FnOnce() -> Result<UnitTiles, Refusal>,
) -> Result<PortableForwardPlan, Refusal> {
    let rows = problem.q_len * problem.group();
    let decode = (rows <= DECODE_ROWS).then(|| few_rows(rows).ok()).flatten();
    let plan = match decode {
        Some(tiles) => PortableForwardPlan {
            tiles,
            packed: true,
            splits: splits(problem, device, &tiles),
        },
        None => PortableForwardPlan {
            tiles: tiles()?,
            packed: false,
            splits: 1,
        },
    };
    let blocks = problem.kv_len.div_ceil(plan.tiles.columns());
    let block = plan
        .tiles
        .block_iterations(problem.head_dim, 1, has_masked(problem));
    let heads = if plan.packed { problem.group() } else { 1 };
    let queries = plan.tiles.rows.min(problem.q_len);
    let block = block + problem.mask_search(heads, queries, plan.tiles.columns());
    let needed = blocks.div_ceil(plan.splits) * block;
    check_iterations(needed, device)?;
    Ok(plan)
}

/// Returns `plan`, or a refusal if the loops of this backward plan exceed a software driver's iteration limit.
pub(crate) fn backward_by(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    plan: PortableBackwardPlan,
) -> Result<PortableBackwardPlan, Refusal> {
    check_iterations(backward_iterations(problem, &plan), device)?;
    Ok(plan)
}

/// Returns the largest number of loop iterations of a unit, over the kernels of the backward. The gradient of a score
/// mod's table does not count, because its launches are divided.
fn backward_iterations(problem: &AttentionProblem, plan: &PortableBackwardPlan) -> usize {
    let PortableBackwardPlan {
        query,
        key_value,
        parts,
        bias,
        table: _,
    } = plan;
    let both = problem.head_dim + problem.value_dim;
    let bias = bias.map_or(0, |bias| bias.iterations(problem));
    // The kernel that computes all three gradients cannot exceed a software driver's iteration limit. Each of its
    // launches covers only as many pairs of tiles as the limit allows.
    let separate = match parts {
        Some(_) => 0,
        None => {
            let query_blocks = problem.q_len.div_ceil(key_value.columns());
            let key_blocks = problem.kv_len.div_ceil(query.columns());
            let masked = has_masked(problem);
            let of_keys = key_value.block_iterations(both, 2, masked)
                + problem.mask_search(1, key_value.columns(), key_value.rows);
            let of_keys = query_blocks * of_keys;
            let of_queries = query.block_iterations(both, 1, masked)
                + problem.mask_search(1, query.rows, query.columns());
            let of_queries = key_blocks * of_queries;
            of_queries.max(problem.group() * of_keys)
        }
    };
    bias.max(separate)
}

/// Returns the number of key splits for a forward whose tiles pack the query heads of a GQA group. The splits fill the
/// device, and each split has at least one key block.
fn splits(problem: &AttentionProblem, device: &DeviceProfile, tiles: &UnitTiles) -> usize {
    let target =
        device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS) * CUBES_PER_MULTIPROCESSOR;
    let blocks = problem
        .visible_keys(problem.q_len)
        .div_ceil(tiles.columns())
        .max(1);
    (target / (problem.batch * problem.kv_heads).max(1)).clamp(1, blocks)
}

/// Returns the largest number of buffers that a kernel of the forward or of the backward binds.
fn bindings(problem: &AttentionProblem, pass: Pass) -> usize {
    let shared = usize::from(problem.mask.is_some())
        + usize::from(problem.bias.is_some())
        + usize::from(problem.has_lengths() || problem.has_bounds())
        + usize::from(problem.score_mod.is_some())
        + usize::from(problem.mask_mod.is_some());
    match pass {
        // Every forward binds query, key, value, output and logsumexp. Quantized keys and values add two buffers of
        // scales, and pages add a page table.
        Pass::Forward => {
            5 + shared
                + usize::from(problem.sinks.is_some())
                + usize::from(problem.page_len.is_some())
                + 2 * usize::from(problem.quantized.is_some())
        }
        // A backward kernel binds at most query, key, value, the output's gradient, the LSE/delta tensor, and two gradients.
        Pass::Backward => 7 + shared,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile_ops::table::{SINGLE, choose};
    use burn::tensor::DType;

    /// Returns the profile of Mesa's software Vulkan driver on two CPU cores.
    fn software() -> DeviceProfile {
        DeviceProfile {
            processors: Some(2),
            ..crate::testing::card(32 << 10)
        }
    }

    /// Returns the number of loop iterations of the kernels in `tile_ops/direct.rs` for one block. The kernels loop over
    /// columns and block rows in steps of four. If the tile may have hidden scores, the kernels also loop over the tile's
    /// rows.
    fn loops(tiles: &UnitTiles, columns: [usize; 2], accumulated: usize, masked: bool) -> usize {
        let sums: usize = columns.iter().map(|columns| columns.div_ceil(4)).sum();
        let marks = if masked { tiles.rows } else { 0 };
        1 + sums + accumulated * (tiles.columns() / 4 + marks)
    }

    #[test]
    fn block_iterations_count_every_loop_of_direct_tiles() {
        for width in [1, 16, 32, 33, 64, 128, 256, 512, 1024] {
            let tiles = choose(SINGLE, width, 0, &software(), 4)
                .expect("the table has a tile for every width");
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
