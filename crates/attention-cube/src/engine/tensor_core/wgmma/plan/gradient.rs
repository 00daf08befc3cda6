//! The tiles of the `wgmma` engine's backward. They determine which gradients each kernel computes, and the layout of
//! the kernel's shared memory.
//!
//! Every kernel holds a stationary tile in shared memory and streams blocks. A tile of queries streams blocks of keys, and a
//! tile of keys streams blocks of queries.
//!
//! Identifiers with *dot* or `q_or_k` are about rows of Q or K. Identifiers with *value* or `v_or_do` are about rows of
//! V or dO.

mod split_d;
mod split_m;

pub use self::split_d::WgmmaGradientSplitDTiles;
pub use self::split_m::WgmmaGradientSplitMTiles;
use super::tiles::{SHARED_MEMORY, WgmmaSplitDTiles};
use super::{check, has_box_of_biases};
use crate::engine::tiling;
use crate::engine::tiling::BackwardTiles;
use crate::math::lse_form::LogsumexpForm;
use crate::math::side::{Side, Sums};
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;
use crate::types::request::Layouts;
use cube_kit::nvidia::Half;

/// The plan of a backward: its kernels and their tiles.
pub type WgmmaBackwardPlan = tiling::BackwardPlan<WgmmaGradientTiles>;

/// The division of a backward tile among the warpgroups of a CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WgmmaGradientTiles {
    /// Split-M: each warpgroup has some rows of the tile, and computes all columns of the gradients of these rows.
    SplitM(WgmmaGradientSplitMTiles),
    /// Split-D: each warpgroup has all rows of the tile, and computes half of the columns of the gradient of these
    /// rows.
    SplitD(WgmmaGradientSplitDTiles),
}

impl BackwardTiles for WgmmaGradientTiles {
    fn side(&self) -> Side {
        match self {
            Self::SplitM(tiles) => tiles.side,
            Self::SplitD(tiles) => tiles.side,
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.rows(),
            Self::SplitD(_) => WgmmaGradientSplitDTiles::ROWS,
        }
    }

    fn columns(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.columns,
            Self::SplitD(_) => WgmmaGradientSplitDTiles::COLUMNS,
        }
    }

    fn sums(&self) -> Sums {
        self.sums()
    }

    fn cubes_per_multiprocessor(&self, _shared_memory: usize) -> usize {
        // Only one CTA runs on a multiprocessor at once, since the registers of the CTA's consumer warpgroups fill the
        // register file.
        1
    }
}

impl WgmmaGradientTiles {
    /// The gradients that the kernel computes.
    pub const fn sums(&self) -> Sums {
        match self {
            Self::SplitM(tiles) => tiles.sums,
            Self::SplitD(tiles) => tiles.sums,
        }
    }

    /// The bytes of shared memory that a CTA uses.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }

    /// True if TMA copies the biases of each block to shared memory.
    pub const fn has_bias_boxes(&self) -> bool {
        match self {
            Self::SplitM(tiles) => tiles.bias_boxes,
            Self::SplitD(_) => false,
        }
    }

    /// The number of threads in a CTA.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitD(_) => WgmmaSplitDTiles::UNITS,
        }
    }
}

/// The parameters of one split-M kernel: `[warpgroups, columns, dot_stages, value_stages, spare]`. The names are those
/// of the fields of [`WgmmaGradientSplitMTiles`].
type Shape = [usize; 5];

/// One row of the split-M table: the parameters of the kernels for operands of up to `width` columns.
struct Row {
    width: usize,
    query: Shape,
    key: Shape,
    /// The parameters of a kernel that computes only dV. If the `key` kernel computes dK and dV, the field is `None`.
    /// dV needs a kernel of its own if the registers of one kernel cannot hold two gradients.
    value: Option<Shape>,
}

// The split-M table. The comment behind a kernel's parameters gives the speed of the whole backward in TFLOP/s.
// Parentheses hold the speeds of the whole backward with other parameters for this kernel. The measured problem is
// causal, with 4 sequences of 4,096 tokens and heads × width = 4,096. The speeds are medians of 20 launches in bf16 on
// one H200, measured on 2026-11-21 (width 64 on 2026-11-22).
const ROWS: &[Row] = &[
    Row {
        width: 64,
        query: [2, 128, 2, 2, 0], // (112 columns: 350; four warpgroups, 48 columns: 310; three, 80 columns: 319 to 332)
        // Without a spare warpgroup (fifth number 0) and with blocks of 48 queries (second number 48) in the key
        // kernel, the backward reaches 332 TFLOP/s.
        key: [2, 80, 2, 2, 1], // 358 (three stages: 355; 64 columns and two spare warpgroups: 356)
        value: None,
    },
    Row {
        width: 128,
        query: [2, 96, 2, 2, 0], // 461 (64 columns: 448; 80 columns: 443)
        key: [2, 64, 3, 3, 0], // 456 (two stages: 443; 48 columns: 443; dK and dV in two kernels: 389)
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
        query: [2, 64, 2, 1, 0], // 413; without the causal mask, 424
        key: [2, 64, 2, 1, 0],
        value: Some([2, 80, 2, 2, 0]), // (64 columns: no change)
    },
];

/// Plans the backward of `problem`, or returns the reason why the engine refuses the problem.
pub(crate) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<WgmmaBackwardPlan, Refusal> {
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
        // With a softcap, TMA copies no biases. The kernel adds the biases from TMA to S before it computes the slope
        // of the softcap. But the slope depends on the score without the bias.
        layouts.tma_bias && has_box_of_biases(problem) && problem.softcap.is_none(),
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
    WgmmaBackwardPlan::new(problem, device, layouts, (query, key, value))
}

/// The largest number of columns for which the stationary tile (64 rows) and a ring of five chunks fit together in
/// shared memory.
const WIDEST: usize = 512;

/// The number of ring stages in a split-D kernel whose stationary tile holds rows of Q or K and rows of V or dO.
const STAGES: usize = 5;
/// The number of ring stages in a split-D kernel whose stationary tile holds only rows of Q or K.
const STAGES_BESIDE_DOTS: usize = 8;

/// Chooses the tiles of the kernels for dQ, for dK and for dV. The tiles for dV are `None` if the kernel for dK also
/// computes dV. If the operands have too many columns for any tiles, all three are `None`.
///
/// `has_logarithms` is true if the LSE of each query is stored as two f32. If `wants_bias_boxes` is true and boxes of
/// biases fit in shared memory, TMA copies the biases there.
pub(crate) fn gradient_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    has_logarithms: bool,
    wants_bias_boxes: bool,
) -> [Option<WgmmaGradientTiles>; 3] {
    let width = head_dim.max(value_dim);
    let lse_delta = if has_logarithms { 3 } else { 2 };
    let Some(row) = ROWS.iter().find(|row| width <= row.width) else {
        let tiles = |side, sums, most| {
            let tiles = |stages| WgmmaGradientSplitDTiles {
                side,
                sums,
                head_dim,
                value_dim,
                half,
                lse_delta,
                stages,
            };
            // If `has_logarithms`, shared memory holds one more f32 per query. For the widest operands, the ring then
            // has room for one stage fewer.
            let fits = tiles(most).shared_memory() <= SHARED_MEMORY;
            Some(WgmmaGradientTiles::SplitD(tiles(if fits {
                most
            } else {
                most - 1
            })))
        };
        return match width <= WIDEST {
            true => [
                tiles(Side::Queries, Sums::QOrK, STAGES),
                tiles(Side::Keys, Sums::QOrK, STAGES),
                tiles(Side::Keys, Sums::Values, STAGES_BESIDE_DOTS),
            ],
            false => [None; 3],
        };
    };
    let tiles = |side, sums, [warpgroups, columns, dot_stages, value_stages, spare]: Shape| {
        let tiles = WgmmaGradientSplitMTiles {
            side,
            sums,
            head_dim,
            value_dim,
            half,
            lse_delta,
            warpgroups,
            columns,
            dot_stages,
            value_stages,
            spare,
            bias_boxes: wants_bias_boxes,
        };
        let bias_boxes = wants_bias_boxes && tiles.shared_memory() <= SHARED_MEMORY;
        Some(WgmmaGradientTiles::SplitM(WgmmaGradientSplitMTiles {
            bias_boxes,
            ..tiles
        }))
    };
    let keys = match row.value {
        Some(_) => Sums::QOrK,
        None => Sums::Both,
    };
    [
        tiles(Side::Queries, Sums::QOrK, row.query),
        tiles(Side::Keys, keys, row.key),
        row.value
            .and_then(|shape| tiles(Side::Keys, Sums::Values, shape)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use cube_kit::nvidia::ROW_BYTES;

    /// Checks that tiles exist for up to 512 columns of Q, K and V. The tiles must fit in a Hopper GPU's shared memory.
    #[test]
    fn gradient_tiles_of_every_width_fit_shared_memory() {
        for head_dim in 1..=WIDEST {
            for value_dim in 1..=WIDEST {
                for (has_logarithms, biases) in [(false, false), (true, false), (true, true)] {
                    let [query, key, value] =
                        gradient_tiles(head_dim, value_dim, Half::Bf16, has_logarithms, biases);
                    for tiles in [query, key, value.or(query)] {
                        let tiles =
                            tiles.unwrap_or_else(|| panic!("no tiles for {head_dim}/{value_dim}"));
                        assert!(tiles.shared_memory() <= SHARED_MEMORY, "{tiles:?}");
                        assert!(tiles.columns().is_multiple_of(16) && tiles.columns() <= 128);
                        if biases && head_dim.max(value_dim) <= 192 {
                            assert!(tiles.has_bias_boxes(), "{tiles:?}");
                        }
                        if let WgmmaGradientTiles::SplitM(tiles) = tiles {
                            // The swizzle pattern of a subtile repeats every 8 rows (of 128 bytes each). The address of
                            // every block of biases must therefore be a multiple of 8 rows.
                            let permuted = [tiles.biases_at(), tiles.bias_bytes()];
                            let whole = |bytes: usize| bytes.is_multiple_of(8 * ROW_BYTES);
                            assert!(permuted.into_iter().all(whole), "{tiles:?}");
                        }
                        let offsets = match tiles {
                            WgmmaGradientTiles::SplitM(tiles) => [
                                tiles.q_or_k_at(),
                                tiles.values_at(),
                                tiles.lse_delta_at(),
                                tiles.term_stride(),
                            ],
                            WgmmaGradientTiles::SplitD(tiles) => [
                                tiles.stages_at(),
                                tiles.factors_at(),
                                tiles.lse_delta_at(),
                                tiles.term_bytes(),
                            ],
                        };
                        // TMA writes to shared memory at each of these offsets, so each offset must be a multiple of 128
                        // bytes.
                        let aligned = |place: usize| place.is_multiple_of(128);
                        assert!(offsets.into_iter().all(aligned), "{tiles:?}");
                    }
                }
            }
        }
    }
}
