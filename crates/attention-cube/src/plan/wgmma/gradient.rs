//! The tiles of the `wgmma` engine's backward: which gradient each of its kernels sums, and where things are in
//! a cube's shared memory.
//!
//! Every kernel holds a tile of one side, queries or keys, and passes over the blocks of the other. *Dots* are
//! the operands whose products are the scores, queries and keys; *values* those whose products are the
//! gradients of P, the output's gradients and the values.

use super::cached;
use super::tiles::{
    ChunkedProduct, ChunkedScores, ColumnTiles, Half, PRODUCT_ROWS, Product, ROW_BYTES, RingShape,
    SUBTILE, ScoreProduct, USED_WORDS, WARPGROUP, is_whole, registers,
};
use crate::AttentionProblem;
use crate::plan::unit::{self, UnitPlan};
use crate::plan::{DeviceProfile, Layouts, Pass, Refusal};

/// The kernels of the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPlan {
    /// Holds queries, and sums their gradient.
    pub query: GradientTiles,
    /// Holds keys, and sums their gradient; the values' too, if these have no kernel of their own.
    pub key: GradientTiles,
    /// Holds keys, and sums the values' gradient.
    pub value: Option<GradientTiles>,
    /// Heads of queries, counted through the sequences, whose tiles are in flight together.
    pub queries_together: usize,
    /// Heads of keys likewise.
    pub keys_together: usize,
    /// The portable engine's kernels, for the queries' terms and the bias's gradient.
    pub rest: unit::BackwardPlan,
}

/// How the warpgroups of a cube divide a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GradientTiles {
    /// By rows.
    Rows(GradientRowTiles),
    /// By columns of the gradient.
    Columns(GradientColumnTiles),
}

impl GradientTiles {
    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.rows(),
            Self::Columns(_) => GradientColumnTiles::ROWS,
        }
    }

    /// Rows of a block of the other side.
    pub const fn columns(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.columns,
            Self::Columns(_) => GradientColumnTiles::COLUMNS,
        }
    }

    /// What is summed.
    pub const fn sums(&self) -> Sums {
        match self {
            Self::Rows(tiles) => tiles.sums,
            Self::Columns(tiles) => tiles.sums,
        }
    }

    /// What the rows are.
    pub const fn side(&self) -> Side {
        match self {
            Self::Rows(tiles) => tiles.side,
            Self::Columns(tiles) => tiles.side,
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.shared_memory(),
            Self::Columns(tiles) => tiles.shared_memory(),
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.units(),
            Self::Columns(_) => ColumnTiles::UNITS,
        }
    }
}

/// The part of [`GradientRowTiles`] that is chosen: warpgroups, columns, stages of dots and of values, and warpgroups to
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

/// The kernels for `problem`, or why there are none.
pub(super) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
    half: Half,
) -> Result<BackwardPlan, Refusal> {
    let AttentionProblem {
        head_dim,
        value_dim,
        ..
    } = *problem;
    let [query, key, value] = gradient_tiles(head_dim, value_dim, half);
    let (Some(query), Some(key)) = (query, key) else {
        return Err(Refusal::Width {
            widest_head: WIDEST,
            widest_value: WIDEST,
            head_dim,
            value_dim,
        });
    };
    for tiles in [Some(query), Some(key), value].into_iter().flatten() {
        if tiles.shared_memory() > device.shared_memory || tiles.units() > device.units_per_cube {
            return Err(Refusal::Tiles {
                width: head_dim.max(value_dim),
                shared_memory: device.shared_memory,
                units: device.units_per_cube,
            });
        }
    }
    let rest = match unit::plan(problem, device, layouts, Pass::Backward)? {
        UnitPlan::Backward(plan) => plan,
        UnitPlan::Forward(_) => unreachable!("a backward was asked for"),
    };
    // Bytes of what a head's tiles pass over.
    let bytes = |length: usize| 2 * length * (head_dim + value_dim);
    let group = problem.group().max(1);
    let together = |bytes, sharing, planes| match problem.causal {
        None => 1,
        Some(_) => cached(bytes, sharing, planes),
    };
    Ok(BackwardPlan {
        query,
        key,
        value,
        queries_together: together(
            bytes(problem.kv_len),
            group,
            problem.batch * problem.q_heads,
        ),
        keys_together: together(
            bytes(problem.q_len) * group,
            1,
            problem.batch * problem.kv_heads,
        ),
        rest,
    })
}

/// The widest operands, of which a tile of 64 rows and five chunks fit.
const WIDEST: usize = 512;

/// Chunks in shared memory beside dots and values, and beside dots alone.
const STAGES: usize = 5;
const STAGES_BESIDE_DOTS: usize = 8;

/// The tiles for operands of this width: of queries, of keys, and of values where these have their own.
pub(crate) fn gradient_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
) -> [Option<GradientTiles>; 3] {
    let width = head_dim.max(value_dim);
    let Some(row) = ROWS.iter().find(|row| width <= row.width) else {
        let tiles = |side, sums, stages| {
            Some(GradientTiles::Columns(GradientColumnTiles {
                side,
                sums,
                head_dim,
                value_dim,
                half,
                stages,
            }))
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
        Some(GradientTiles::Rows(GradientRowTiles {
            side,
            sums,
            head_dim,
            value_dim,
            half,
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

/// Registers a thread of a warpgroup that does not multiply.
const FETCHING_REGISTERS: usize = 24;

/// What the rows of a tile are; the blocks that it visits are of the other side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The tile holds queries, and sees keys.
    Queries,
    /// The tile holds keys, and is seen by queries.
    Keys,
}

/// Which gradients a kernel sums in registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sums {
    /// Of the dots that it holds: queries, or keys.
    Dots,
    /// Of the values that it holds.
    Values,
    /// Of keys and values.
    Both,
}

impl Sums {
    /// Whether the gradients of the scores are needed.
    pub const fn has_dots(self) -> bool {
        matches!(self, Self::Dots | Self::Both)
    }

    /// Whether P is multiplied.
    pub const fn has_values(self) -> bool {
        matches!(self, Self::Values | Self::Both)
    }
}

/// Both warpgroups have the same 64 rows, and each has half of the columns of their gradient:
/// `kernel/backward/by_columns.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientColumnTiles {
    /// What the rows are.
    pub side: Side,
    /// What is summed; not both.
    pub sums: Sums,
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Chunks in shared memory.
    pub stages: usize,
}

impl GradientColumnTiles {
    /// Rows of a tile.
    pub const ROWS: usize = ColumnTiles::ROWS;
    /// Rows of a block of the other side: each warpgroup has half of the scores' columns.
    pub const COLUMNS: usize = ColumnTiles::KEYS;
    /// Blocks whose terms are in shared memory.
    const TERM_STAGES: usize = 2;

    /// Chunks of a block of dots, which are subtiles of a row.
    pub const fn dot_chunks(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Chunks of a block of values.
    pub const fn value_chunks(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// Columns that the gradient has.
    pub const fn width(&self) -> usize {
        if self.sums.has_dots() {
            self.head_dim
        } else {
            self.value_dim
        }
    }

    /// Columns of it that a warpgroup has.
    pub const fn own_columns(&self) -> usize {
        self.width().div_ceil(2).next_multiple_of(8)
    }

    /// Subtiles of these.
    pub const fn own_subtiles(&self) -> usize {
        self.own_columns().div_ceil(SUBTILE)
    }

    /// Chunks of the block that is multiplied with P or dS, one after the other for either warpgroup.
    pub const fn sum_chunks(&self) -> usize {
        ColumnTiles::WARPGROUPS * ColumnTiles::KEYS / ColumnTiles::VALUE_KEYS
    }

    /// Bytes of such a chunk.
    pub const fn sum_bytes(&self) -> usize {
        ColumnTiles::VALUE_KEYS * ROW_BYTES * self.own_subtiles()
    }

    /// Chunks that pass for a block.
    pub const fn block_chunks(&self) -> usize {
        let scores = if self.sums.has_dots() {
            self.dot_chunks() + self.value_chunks()
        } else {
            self.dot_chunks()
        };
        scores + self.sum_chunks()
    }

    /// Bytes of the dots that are held.
    pub const fn held_dot_bytes(&self) -> usize {
        Self::ROWS * self.dot_chunks() * ROW_BYTES
    }

    /// Bytes of the values that are held, where these are needed.
    pub const fn held_value_bytes(&self) -> usize {
        if self.sums.has_dots() {
            Self::ROWS * self.value_chunks() * ROW_BYTES
        } else {
            0
        }
    }

    /// Bytes of the queries' terms that come with a block of these: two f32 each.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 8 * Self::COLUMNS,
        }
    }

    /// Where the stages start.
    pub const fn stages_at(&self) -> usize {
        self.held_dot_bytes() + self.held_value_bytes()
    }

    /// Where P, or dS, goes.
    pub const fn factors_at(&self) -> usize {
        self.stages_at() + self.stages * ColumnTiles::STAGE_BYTES
    }

    /// Where the terms start.
    pub const fn terms_at(&self) -> usize {
        self.factors_at() + 2 * ColumnTiles::HALF_BYTES
    }

    /// Where the barriers start: full and empty of every stage, and one for what is held.
    pub const fn barriers_at(&self) -> usize {
        self.terms_at() + Self::TERM_STAGES * self.term_bytes()
    }

    /// Where the words start in which a bit stands for a column that some row uses.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.stages + 1)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// The ring of chunks.
    pub const fn ring(&self) -> RingShape {
        RingShape {
            stages: self.stages,
            whole_rounds: self.dot_chunks().is_multiple_of(self.stages)
                && self.value_chunks().is_multiple_of(self.stages)
                && self.sum_chunks().is_multiple_of(self.stages),
        }
    }

    /// The product that makes S, where `depth` is that of dots, or dP, after S.
    pub const fn score_product(&self, depth: usize, frees_before: bool) -> ChunkedScores {
        ChunkedScores {
            depth,
            register_chunks: 0,
            query_fragment: 0,
            frees_before,
            ring: self.ring(),
            half: self.half,
        }
    }

    /// The product that adds to the gradient.
    pub const fn sum_product(&self) -> ChunkedProduct {
        ChunkedProduct {
            columns: self.own_columns(),
            ring: self.ring(),
            half: self.half,
        }
    }

    /// Sizes of the vectors of registers of S and dP, of P and dS, and of the gradient.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            Self::COLUMNS / 4,
            Self::COLUMNS / 8,
            self.sum_product().fragment(),
        ]
    }

    /// Whether a chunk that is multiplied with P or dS is one box.
    pub const fn has_whole_sums(&self) -> bool {
        is_whole(self.width()) && is_whole(self.own_columns())
    }

    /// Whether the gradient leaves through the dots' place in shared memory: it must fit, and a warpgroup's part
    /// must not share a subtile with the other's.
    pub const fn boxes_gradient(&self) -> bool {
        self.own_columns().is_multiple_of(SUBTILE)
            && ColumnTiles::WARPGROUPS * self.own_subtiles() <= self.dot_chunks()
    }
}

/// Each warpgroup has 64 rows and all columns of their gradients: `kernel/backward/by_rows.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientRowTiles {
    /// What the rows are.
    pub side: Side,
    /// What is summed.
    pub sums: Sums,
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Warpgroups that multiply.
    pub warpgroups: usize,
    /// Rows of a block of the other side: the columns of the scores.
    pub columns: usize,
    /// Blocks of dots in shared memory.
    pub dot_stages: usize,
    /// Blocks of values in shared memory.
    pub value_stages: usize,
    /// Warpgroups that do nothing but give their registers. ptxas hands registers out anew (`setmaxnreg`) only in kernels that
    /// need more than a thread has at entry, else it keeps to these (C7508): with more threads that is fewer.
    pub spare: usize,
}

impl GradientRowTiles {
    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        PRODUCT_ROWS * self.warpgroups
    }

    /// Threads of a cube: a warpgroup more than multiply fetches.
    pub const fn units(&self) -> usize {
        WARPGROUP * (self.warpgroups + 1 + self.spare)
    }

    /// Subtiles of a row of queries or keys.
    pub const fn dot_subtiles(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Subtiles of a row of values.
    pub const fn value_subtiles(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// Bytes of the dots that are held.
    pub const fn held_dot_bytes(&self) -> usize {
        self.rows() * self.dot_subtiles() * ROW_BYTES
    }

    /// Bytes of the values that are held, where these are needed.
    pub const fn held_value_bytes(&self) -> usize {
        if self.sums.has_dots() {
            self.rows() * self.value_subtiles() * ROW_BYTES
        } else {
            0
        }
    }

    /// Bytes of a block of dots.
    pub const fn dot_bytes(&self) -> usize {
        self.columns * self.dot_subtiles() * ROW_BYTES
    }

    /// Bytes of a block of values.
    pub const fn value_bytes(&self) -> usize {
        self.columns * self.value_subtiles() * ROW_BYTES
    }

    /// Bytes of the queries' terms that come with a block of these: two f32 each.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 8 * self.columns,
        }
    }

    /// Where the blocks of dots start.
    pub const fn dots_at(&self) -> usize {
        self.held_dot_bytes() + self.held_value_bytes()
    }

    /// Where the blocks of values start.
    pub const fn values_at(&self) -> usize {
        self.dots_at() + self.dot_stages * self.dot_bytes()
    }

    /// Where the terms start.
    pub const fn terms_at(&self) -> usize {
        self.values_at() + self.value_stages * self.value_bytes()
    }

    /// Where the barriers start: full and empty of every stage of dots and of values, and one for what is held.
    pub const fn barriers_at(&self) -> usize {
        self.terms_at() + self.dot_stages * self.term_bytes()
    }

    /// Where the words start in which a bit stands for a column that some row uses.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.dot_stages + 2 * self.value_stages + 1)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// Columns of the dots' gradient in registers.
    pub const fn dot_columns(&self) -> usize {
        self.head_dim.next_multiple_of(8)
    }

    /// Columns of the values' gradient in registers.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(8)
    }

    /// Sizes of the vectors of registers of S and dP, of P and dS, and of the gradients.
    pub const fn fragments(&self) -> [usize; 4] {
        [
            registers(self.columns / 2),
            registers(self.columns / 4),
            registers(self.dot_columns() / 2),
            registers(self.value_columns() / 2),
        ]
    }

    /// The product that makes S, where it is the dots', or dP.
    pub const fn score_product(&self, depth: usize) -> ScoreProduct {
        ScoreProduct {
            depth,
            left_rows: self.rows(),
            right_rows: self.columns,
            half: self.half,
        }
    }

    /// The product that adds to a gradient of so many columns.
    pub const fn sum_product(&self, columns: usize) -> Product {
        Product {
            depth: self.columns,
            columns,
            half: self.half,
        }
    }

    /// Whether the dots' gradient leaves through their place in shared memory.
    pub const fn boxes_dots(&self) -> bool {
        self.head_dim.is_multiple_of(16)
    }

    /// Whether the values' gradient leaves through shared memory: the values' place there, or the dots'.
    pub const fn boxes_values(&self) -> bool {
        self.value_dim.is_multiple_of(16)
            && (self.sums.has_dots() || self.value_subtiles() <= self.dot_subtiles())
    }

    /// Registers a thread of the warpgroup that fetches, and of those that multiply.
    pub const fn thread_registers(&self) -> [usize; 2] {
        // What the cube starts with is handed out anew: of 65,536, by eights a thread.
        let all = 65_536 / self.units() / 8 * 8 * self.units();
        let idle = WARPGROUP * FETCHING_REGISTERS * (1 + self.spare);
        let each = (all - idle) / (WARPGROUP * self.warpgroups) / 8 * 8;
        [FETCHING_REGISTERS, if each < 240 { each } else { 240 }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every width up to the limit has tiles, and these fit a Hopper GPU's shared memory.
    #[test]
    fn every_width_has_tiles_that_fit() {
        for head_dim in 1..=WIDEST {
            for value_dim in 1..=WIDEST {
                let [query, key, value] = gradient_tiles(head_dim, value_dim, Half::Bf16);
                for tiles in [query, key, value.or(query)] {
                    let tiles = tiles.unwrap_or_else(|| panic!("none for {head_dim}/{value_dim}"));
                    assert!(tiles.shared_memory() <= 232_448, "{tiles:?}");
                    assert!(tiles.columns().is_multiple_of(16) && tiles.columns() <= 128);
                }
            }
        }
    }
}
