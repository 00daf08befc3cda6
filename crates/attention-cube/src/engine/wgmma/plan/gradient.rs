//! The tiles of the `wgmma` engine's backward: which gradient each of its kernels sums, and where things are in
//! a cube's shared memory.
//!
//! Every kernel holds a tile of one side, queries or keys, and passes over the blocks of the other. *Dots* are
//! the operands whose products are the scores, queries and keys; *values* those whose products are the
//! gradients of P, the output's gradients and the values.

mod split_d;
mod split_m;

pub use self::split_d::GradientSplitDTiles;
pub use self::split_m::GradientSplitMTiles;
use super::check;
use super::tiles::{SHARED_MEMORY, SplitDTiles};
use crate::AttentionProblem;
use crate::device::DeviceProfile;
use crate::division::{self, HeldTiles};
use crate::math::side::{Side, Sums};
use crate::passes::delta::form::LogsumexpForm;
use crate::select::{Layouts, Refusal};
use cube_kit::hopper::Half;

/// The kernels of the backward.
pub type BackwardPlan = division::BackwardPlan<GradientTiles>;

/// How the warpgroups of a cube divide a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientTiles {
    /// Split-M: each warpgroup has rows.
    SplitM(GradientSplitMTiles),
    /// Split-D: each warpgroup has columns of the gradient.
    SplitD(GradientSplitDTiles),
}

impl HeldTiles for GradientTiles {
    fn side(&self) -> Side {
        match self {
            Self::SplitM(tiles) => tiles.side,
            Self::SplitD(tiles) => tiles.side,
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.rows(),
            Self::SplitD(_) => GradientSplitDTiles::ROWS,
        }
    }

    fn columns(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.columns,
            Self::SplitD(_) => GradientSplitDTiles::COLUMNS,
        }
    }
}

impl GradientTiles {
    /// What is summed.
    pub const fn sums(&self) -> Sums {
        match self {
            Self::SplitM(tiles) => tiles.sums,
            Self::SplitD(tiles) => tiles.sums,
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitD(_) => SplitDTiles::UNITS,
        }
    }
}

/// The part of [`GradientSplitMTiles`] that is chosen: warpgroups, columns, stages of dots and of values, and warpgroups to
/// spare.
type Shape = [usize; 5];

/// The kernels for operands of up to this width.
struct Row {
    width: usize,
    query: Shape,
    key: Shape,
    /// Where keys and values do not fit one kernel's registers.
    value: Option<Shape>,
}

// TFLOP/s of the whole backward, bf16, one H200, median of 20 launches, causal B4 S4096 with heads × width = 4096,
// 2026-11-21, width 64 on 2026-11-22; others that were tried in brackets, by the columns of a block.
const ROWS: &[Row] = &[
    Row {
        width: 64,
        query: [2, 128, 2, 2, 0], // (112: 350; four warpgroups of 48: 310; three of 80: 319 to 332)
        // With the spare warpgroup; without one 48 columns: 332.
        key: [2, 80, 2, 2, 1], // 358 (three stages: 355; 64 columns and two to spare: 356)
        value: None,
    },
    Row {
        width: 128,
        query: [2, 96, 2, 2, 0], // 461 (64: 448, 80: 443)
        key: [2, 64, 3, 3, 0],   // 456 (two stages: 443; 48: 443; apart: 389)
        value: None,
    },
    Row {
        width: 192,
        query: [2, 64, 2, 2, 0],
        key: [2, 64, 2, 2, 0],
        value: Some([2, 80, 2, 2, 0]),
    },
    Row {
        width: 256,
        query: [2, 64, 2, 1, 0], // 413, full 424
        key: [2, 64, 2, 1, 0],
        value: Some([2, 80, 2, 2, 0]), // (64: the same)
    },
];

/// The kernels of the backward of `problem`, or why there are none.
pub(crate) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<BackwardPlan, Refusal> {
    let half = check(problem, device)?;
    let AttentionProblem {
        head_dim,
        value_dim,
        ..
    } = *problem;
    let [query, key, value] = gradient_tiles(
        head_dim,
        value_dim,
        half,
        LogsumexpForm::of_problem(problem) == LogsumexpForm::Apart,
    );
    let (Some(query), Some(key)) = (query, key) else {
        return Err(Refusal::Width {
            widest_head: WIDEST,
            widest_value: WIDEST,
            head_dim,
            value_dim,
        });
    };
    let kernels = [Some(query), Some(key), value].into_iter().flatten();
    for tiles in kernels {
        if tiles.shared_memory() > device.shared_memory || tiles.units() > device.units_per_cube {
            return Err(Refusal::Tiles {
                width: head_dim.max(value_dim),
                shared_memory: device.shared_memory,
                units: device.units_per_cube,
            });
        }
    }
    BackwardPlan::new(problem, device, layouts, (query, key, value))
}

/// The widest operands, of which a tile of 64 rows and five chunks fit.
const WIDEST: usize = 512;

/// Chunks in shared memory beside dots and values, and beside dots alone.
const STAGES: usize = 5;
const STAGES_BESIDE_DOTS: usize = 8;

/// The tiles for operands of this width, with a bias or without: of queries, of keys, and of values where these have their own.
pub(crate) fn gradient_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    has_logarithms: bool,
) -> [Option<GradientTiles>; 3] {
    let width = head_dim.max(value_dim);
    let terms = if has_logarithms { 3 } else { 2 };
    let Some(row) = ROWS.iter().find(|row| width <= row.width) else {
        let tiles = |side, sums, most| {
            let tiles = |stages| GradientSplitDTiles {
                side,
                sums,
                head_dim,
                value_dim,
                half,
                terms,
                stages,
            };
            // With a bias a query has a number more, for which the widest operands leave one chunk less.
            let fits = tiles(most).shared_memory() <= SHARED_MEMORY;
            Some(GradientTiles::SplitD(tiles(if fits {
                most
            } else {
                most - 1
            })))
        };
        return match width <= WIDEST {
            true => [
                tiles(Side::Queries, Sums::Dots, STAGES),
                tiles(Side::Keys, Sums::Dots, STAGES),
                tiles(Side::Keys, Sums::Values, STAGES_BESIDE_DOTS),
            ],
            false => [None; 3],
        };
    };
    let tiles = |side, sums, [warpgroups, columns, dot_stages, value_stages, spare]: Shape| {
        Some(GradientTiles::SplitM(GradientSplitMTiles {
            side,
            sums,
            head_dim,
            value_dim,
            half,
            terms,
            warpgroups,
            columns,
            dot_stages,
            value_stages,
            spare,
        }))
    };
    let keys = match row.value {
        Some(_) => Sums::Dots,
        None => Sums::Both,
    };
    [
        tiles(Side::Queries, Sums::Dots, row.query),
        tiles(Side::Keys, keys, row.key),
        row.value
            .and_then(|shape| tiles(Side::Keys, Sums::Values, shape)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every width up to the limit has tiles, and these fit a Hopper GPU's shared memory.
    #[test]
    fn every_width_has_tiles_that_fit() {
        for head_dim in 1..=WIDEST {
            for value_dim in 1..=WIDEST {
                for has_logarithms in [false, true] {
                    let [query, key, value] =
                        gradient_tiles(head_dim, value_dim, Half::Bf16, has_logarithms);
                    for tiles in [query, key, value.or(query)] {
                        let tiles =
                            tiles.unwrap_or_else(|| panic!("none for {head_dim}/{value_dim}"));
                        assert!(tiles.shared_memory() <= SHARED_MEMORY, "{tiles:?}");
                        assert!(tiles.columns().is_multiple_of(16) && tiles.columns() <= 128);
                        let places = match tiles {
                            GradientTiles::SplitM(tiles) => [
                                tiles.dots_at(),
                                tiles.values_at(),
                                tiles.terms_at(),
                                tiles.term_stride(),
                            ],
                            GradientTiles::SplitD(tiles) => [
                                tiles.stages_at(),
                                tiles.factors_at(),
                                tiles.terms_at(),
                                tiles.term_bytes(),
                            ],
                        };
                        // Where the copy engine writes.
                        let aligned = |place: usize| place.is_multiple_of(128);
                        assert!(places.into_iter().all(aligned), "{tiles:?}");
                    }
                }
            }
        }
    }
}
