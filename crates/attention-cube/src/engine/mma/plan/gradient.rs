//! The tiles of the `mma` engine's backward: which gradient each of its kernels sums, and where things are in a cube's shared
//! memory.
//!
//! Every kernel holds a tile of one side, queries or keys, and passes over the blocks of the other. *Dots* are the operands whose
//! products are the scores, queries and keys; *values* those whose products are the gradients of P, the output's gradients and the
//! values.

use super::check;
use super::split_m::STEP;
use crate::AttentionProblem;
use crate::device::DeviceProfile;
use crate::division::{self, HeldTiles};
use crate::math::side::{Side, Sums};
use crate::select::{Layouts, Refusal};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE, registers};

/// The kernels of the backward.
pub type BackwardPlan = division::BackwardPlan<GradientTiles>;

/// Each warp has rows, and all columns of their gradients: `backward/split_m.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientTiles {
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
    /// Numbers that come with a query: its reference and Δ, and where there is a bias the logarithm of the sum by the reference.
    pub terms: usize,
    /// Warps of a cube.
    pub warps: usize,
    /// Fragments of 16 rows that a warp has: 1 or 2, which read an operand's rows once for both.
    pub fragments: usize,
    /// Rows of a block of the other side, the columns of the scores: 16, 32 or 64.
    pub columns: usize,
}

impl HeldTiles for GradientTiles {
    fn side(&self) -> Side {
        self.side
    }

    fn rows(&self) -> usize {
        self.rows()
    }

    fn columns(&self) -> usize {
        self.columns
    }
}

impl GradientTiles {
    /// Blocks in shared memory: one is multiplied, the next is on its way.
    const STAGES: usize = 2;

    /// Rows of a tile.
    pub const fn rows(&self) -> usize {
        self.warps * self.warp_rows()
    }

    /// Rows of a warp.
    pub const fn warp_rows(&self) -> usize {
        FRAGMENT_ROWS * self.fragments
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        32 * self.warps
    }

    /// Bytes of so many rows of queries or keys.
    const fn dot_bytes(&self, rows: usize) -> usize {
        rows * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Bytes of so many rows of values.
    const fn value_bytes(&self, rows: usize) -> usize {
        rows * self.value_dim.div_ceil(SUBTILE) * ROW_BYTES
    }

    /// Bytes of the queries' terms that come with a block of these, in f32.
    const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.terms * self.columns,
        }
    }

    /// Where the values that are held start, behind the dots.
    pub const fn stationary_values_at(&self) -> usize {
        self.dot_bytes(self.rows())
    }

    /// Where the first block starts, behind the values that are held where these are needed.
    pub const fn blocks_at(&self) -> usize {
        let values = match self.sums.has_dots() {
            true => self.value_bytes(self.rows()),
            false => 0,
        };
        self.stationary_values_at() + values
    }

    /// Where in a block its values start, behind its dots.
    pub const fn block_values_at(&self) -> usize {
        self.dot_bytes(self.columns)
    }

    /// Where in a block its terms start.
    pub const fn block_terms_at(&self) -> usize {
        self.block_values_at() + self.value_bytes(self.columns)
    }

    /// From a block to the next, whose rows start at a multiple of a subtile's.
    pub const fn block_bytes(&self) -> usize {
        (self.block_terms_at() + self.term_bytes()).next_multiple_of(ROW_BYTES)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        self.blocks_at() + Self::STAGES * self.block_bytes()
    }

    /// Columns of the dots' gradient in registers.
    pub const fn dot_columns(&self) -> usize {
        self.head_dim.next_multiple_of(STEP)
    }

    /// Columns of the values' gradient in registers.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(STEP)
    }

    /// Sizes of the vectors of registers of a fragment, of S and dP, of P and dS, and of the gradients; and of all of a warp's.
    pub const fn vectors(&self) -> [usize; 8] {
        let (s, p) = (registers(self.columns / 2), registers(self.columns / 4));
        let dots = registers(self.dot_columns() / 2);
        let values = registers(self.value_columns() / 2);
        let all = self.fragments;
        [
            s,
            p,
            dots,
            values,
            all * s,
            all * p,
            all * dots,
            all * values,
        ]
    }
}

/// The part of [`GradientTiles`] that is chosen: warps, fragments of each, and columns.
type Shape = [usize; 3];

/// The kernels for operands of up to this width, on cards whose cubes may take so many KB of shared memory.
struct Row {
    width: usize,
    shared_memory: usize,
    query: Shape,
    key: Shape,
    /// Where keys and values do not fit one kernel's registers.
    value: Option<Shape>,
}

const fn row(
    [width, shared_memory]: [usize; 2],
    query: Shape,
    key: Shape,
    value: Option<Shape>,
) -> Row {
    Row {
        width,
        shared_memory,
        query,
        key,
        value,
    }
}

/// The first that is wide enough and whose shared memory the device has. Two cubes of four warps share a multiprocessor, where there
/// is room for them, or one has eight: so that one warp multiplies while another makes weights.
const ROWS: &[Row] = &[
    row([64, 99], [4, 2, 32], [4, 2, 32], None),
    row([128, 227], [4, 2, 32], [8, 1, 64], None),
    row([128, 163], [8, 1, 64], [8, 1, 64], None),
    row([128, 99], [8, 1, 32], [8, 1, 32], None),
    row([256, 227], [8, 1, 32], [8, 1, 32], Some([8, 1, 32])),
    row([256, 163], [4, 1, 32], [4, 1, 32], Some([8, 1, 32])),
    row([256, 99], [4, 1, 16], [4, 1, 16], Some([4, 1, 32])),
];

/// The kernels of the backward of `problem`, or why there are none.
pub(crate) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<BackwardPlan, Refusal> {
    let half = check(problem, device)?;
    let kernels = gradient_tiles(
        problem.head_dim,
        problem.value_dim,
        half,
        problem.bias.is_some(),
        device,
    )?;
    BackwardPlan::new(problem, device, layouts, kernels)
}

/// Tiles of queries, of keys, and of values where these have a kernel of their own.
type Kernels = (GradientTiles, GradientTiles, Option<GradientTiles>);

/// The tiles for operands of this width, with a bias or without, that fit the device.
pub(crate) fn gradient_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    biased: bool,
    device: &DeviceProfile,
) -> Result<Kernels, Refusal> {
    let width = head_dim.max(value_dim);
    let mut rows = ROWS.iter().filter(|row| width <= row.width).peekable();
    if rows.peek().is_none() {
        let widest = ROWS.last().map_or(0, |row| row.width);
        return Err(Refusal::Width {
            widest_head: widest,
            widest_value: widest,
            head_dim,
            value_dim,
        });
    }
    let tiles = |side, sums, [warps, fragments, columns]: Shape| GradientTiles {
        side,
        sums,
        head_dim,
        value_dim,
        half,
        terms: if biased { 3 } else { 2 },
        warps,
        fragments,
        columns,
    };
    let row = rows
        .find(|row| {
            row.shared_memory << 10 <= device.shared_memory
                && [row.query, row.key]
                    .into_iter()
                    .chain(row.value)
                    .all(|[warps, ..]| 32 * warps <= device.units_per_cube)
        })
        .ok_or(Refusal::Tiles {
            width,
            shared_memory: device.shared_memory,
            units: device.units_per_cube,
        })?;
    let keys = match row.value {
        Some(_) => Sums::Dots,
        None => Sums::Both,
    };
    let value = row.value;
    Ok((
        tiles(Side::Queries, Sums::Dots, row.query),
        tiles(Side::Keys, keys, row.key),
        value.map(|shape| tiles(Side::Keys, Sums::Values, shape)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::card;

    /// Every width up to the limit has tiles for every size of shared memory that cards since Ampere have, and these divide as the
    /// kernels assume.
    #[test]
    fn every_width_has_tiles_that_fit() {
        for shared_memory in [99 << 10, 163 << 10, 227 << 10] {
            let device = card(shared_memory);
            for width in 1..=256 {
                for (head_dim, value_dim) in [(width, width), (width, 8), (8, width)] {
                    for biased in [false, true] {
                        let kernels =
                            gradient_tiles(head_dim, value_dim, Half::Bf16, biased, &device);
                        let (query, key, value) = kernels.unwrap_or_else(|refusal| {
                            panic!("{head_dim}/{value_dim}, {shared_memory}: {refusal}")
                        });
                        for tiles in [Some(query), Some(key), value].into_iter().flatten() {
                            assert!(tiles.shared_memory() <= shared_memory, "{tiles:?}");
                            assert!([16, 32, 64].contains(&tiles.columns), "{tiles:?}");
                            assert!([1, 2].contains(&tiles.fragments), "{tiles:?}");
                            // The permutation of a row's pieces is by its number in the subtile.
                            let places = [tiles.blocks_at(), tiles.block_values_at()];
                            let aligned = |place: usize| place.is_multiple_of(8 * ROW_BYTES);
                            assert!(places.into_iter().all(aligned), "{tiles:?}");
                            assert!(tiles.block_bytes().is_multiple_of(ROW_BYTES), "{tiles:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn wider_heads_are_refused() {
        let tiles = gradient_tiles(257, 64, Half::F16, false, &card(227 << 10));
        assert!(matches!(tiles, Err(Refusal::Width { .. })), "{tiles:?}");
    }
}
