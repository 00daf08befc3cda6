//! The tiles of the `wgmma` engine's backward: which gradient each of its kernels sums, and where things are in
//! a cube's shared memory.
//!
//! Every kernel holds a tile of one side, queries or keys, and passes over the blocks of the other. *Dots* are
//! the operands whose products are the scores, queries and keys; *values* those whose products are the
//! gradients of P, the output's gradients and the values.

use super::cached;
use super::tiles::{Half, PRODUCT_ROWS, Product, ROW_BYTES, SUBTILE, ScoreProduct, USED_WORDS};
use super::tiles::{WARPGROUP, registers};
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
}

impl GradientTiles {
    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.rows(),
        }
    }

    /// Rows of a block of the other side.
    pub const fn columns(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.columns,
        }
    }

    /// What is summed.
    pub const fn sums(&self) -> Sums {
        match self {
            Self::Rows(tiles) => tiles.sums,
        }
    }

    /// What the rows are.
    pub const fn side(&self) -> Side {
        match self {
            Self::Rows(tiles) => tiles.side,
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.shared_memory(),
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.units(),
        }
    }
}

/// The part of [`GradientRowTiles`] that is chosen: warpgroups, columns, stages of dots and of values.
type Shape = [usize; 4];

/// The kernels for operands of up to this width.
struct Row {
    width: usize,
    query: Shape,
    key: Shape,
    /// Where keys and values do not fit one kernel's registers.
    value: Option<Shape>,
}

const ROWS: &[Row] = &[
    Row {
        width: 64,
        query: [2, 128, 2, 2],
        key: [2, 112, 2, 2],
        value: None,
    },
    Row {
        width: 128,
        query: [2, 96, 2, 2],
        key: [2, 48, 3, 3],
        value: None,
    },
    Row {
        width: 192,
        query: [2, 64, 2, 2],
        key: [2, 64, 2, 2],
        value: Some([2, 80, 2, 2]),
    },
    Row {
        width: 256,
        query: [2, 64, 2, 1],
        key: [2, 64, 2, 1],
        value: Some([2, 80, 2, 2]),
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

/// The widest operands.
const WIDEST: usize = 256;

/// The tiles for operands of this width: of queries, of keys, and of values where these have their own.
fn gradient_tiles(head_dim: usize, value_dim: usize, half: Half) -> [Option<GradientTiles>; 3] {
    let width = head_dim.max(value_dim);
    let Some(row) = ROWS.iter().find(|row| width <= row.width) else {
        return [None; 3];
    };
    let tiles = |side, sums, shape: Shape| {
        let name = match (side, sums) {
            (Side::Queries, _) => "GRAD_Q",
            (_, Sums::Values) => "GRAD_V",
            _ => "GRAD_K",
        };
        let own: Vec<usize> = std::env::var(name)
            .map(|x| x.split('_').map(|x| x.parse().unwrap()).collect())
            .unwrap_or(shape.to_vec());
        let [warpgroups, columns, dot_stages, value_stages]: Shape = own.try_into().unwrap();
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
            takes_turns: std::env::var("GRAD_TURNS").map_or(true, |x| x == "1"),
        }))
    };
    let apart = std::env::var("GRAD_V").is_ok();
    let value_row = if apart { Some(row.value.unwrap_or(row.query)) } else { row.value };
    let keys = match value_row {
        Some(_) => Sums::Dots,
        None => Sums::Both,
    };
    [
        tiles(Side::Queries, Sums::Dots, row.query),
        tiles(Side::Keys, keys, row.key),
        value_row
            .and_then(|shape| tiles(Side::Keys, Sums::Values, shape)),
    ]
}

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
    /// Whether warpgroups issue their products in turns: see [`super::RowTiles::takes_turns`].
    pub takes_turns: bool,
}

impl GradientRowTiles {
    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        PRODUCT_ROWS * self.warpgroups
    }

    /// Threads of a cube: a warpgroup more than multiply fetches.
    pub const fn units(&self) -> usize {
        WARPGROUP * (self.warpgroups + 1)
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

    /// Products that make scores and their gradients of a block: S, and dP where it is needed.
    pub const fn score_products(&self) -> usize {
        if self.sums.has_dots() { 2 } else { 1 }
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
        match self.warpgroups {
            1 => [56, 240],
            2 => [24, 240],
            _ => [32, 160],
        }
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
