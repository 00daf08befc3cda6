//! The plan of the `mma` engine: tiles from tables by head size and by the shared memory that the device has.

mod bias_gradient;
mod few_rows;
mod gradient;
pub mod ring;
mod shape;
pub mod split_d;
pub mod split_m;
pub mod split_n;
pub mod warp;
mod words;

pub use self::bias_gradient::BiasGradientTiles;
pub(crate) use self::bias_gradient::bias_gradient_tiles;
pub(crate) use self::few_rows::few_rows_tiles;
use self::few_rows::sums_as_backward;
pub(super) use self::gradient::backward;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use self::gradient::gradient_tiles;
pub use self::gradient::{
    BackwardPlan, GradientSplitDTiles, GradientSplitMTiles, GradientTiles, Held,
};
use self::shape::{Shape, split_d, split_m, without_queries};
use self::split_d::SplitDTiles;
use self::split_m::SplitMTiles;
use self::split_n::SplitNTiles;
pub(crate) use self::words::word_tiles;
use crate::AttentionProblem;
use crate::device::{DeviceProfile, Feature};
use crate::division::{check_sizes, heads_of_tile, query_tiles, splits, splits_in_rounds};
use crate::math::side::Side;
use crate::passes::mask_bits::plan::check_mask;
use crate::select::{Layouts, Operands, Pass, Refusal};
use cube_kit::hopper::{ASSUMED_MULTIPROCESSORS, Half};

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
    /// Operands that are copied first, to rows of whole pieces of 16 bytes.
    pub copies: Operands,
}

/// The tiles of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardTiles {
    /// Warps have rows, and all columns of their output.
    SplitM(SplitMTiles),
    /// Warps have keys, of few rows.
    SplitN(SplitNTiles),
    /// Warps have rows, and a part of the columns of their output.
    SplitD(SplitDTiles),
}

impl ForwardTiles {
    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.rows(),
            Self::SplitN(tiles) => tiles.rows(),
            Self::SplitD(tiles) => tiles.rows,
        }
    }

    /// Keys of a block.
    pub const fn keys(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.keys,
            Self::SplitN(tiles) => tiles.keys,
            Self::SplitD(tiles) => tiles.keys,
        }
    }

    /// Threads of a cube.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitN(tiles) => tiles.units(),
            Self::SplitD(tiles) => tiles.units(),
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitN(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }

    /// Keys that a cube multiplies side by side.
    const fn keys_at_once(&self) -> usize {
        match self {
            Self::SplitN(tiles) => tiles.keys * tiles.key_groups,
            Self::SplitM(_) | Self::SplitD(_) => self.keys(),
        }
    }

    /// Cubes that a multiprocessor runs side by side, of a device whose cubes may take so much shared memory.
    fn cubes_per_multiprocessor(&self, shared_memory: usize) -> usize {
        let by_registers = REGISTERS / (REGISTERS_PER_THREAD * self.units());
        by_registers
            .min(cubes_that_fit(self.shared_memory(), shared_memory))
            .max(1)
    }
}

/// Registers of a multiprocessor, and the most of a thread, which the kernels' may come near.
const REGISTERS: usize = 65_536;
const REGISTERS_PER_THREAD: usize = 256;

/// Bytes of shared memory that the driver takes of every cube.
const DRIVERS_BYTES: usize = 1024;

/// Cubes with so many bytes that fit a multiprocessor's shared memory, of which a cube alone may have what `shared_memory` says.
const fn cubes_that_fit(bytes: usize, shared_memory: usize) -> usize {
    (shared_memory + DRIVERS_BYTES) / (bytes + DRIVERS_BYTES)
}

/// The first that is wide enough and fits, of each width for 227, 163 and 99 KB. TFLOP/s on one H200 (2026-11-23), bf16, at 4,096 queries
/// and keys, all seen and causal.
const FORWARD: &[Shape] = &[
    // 316 and 298 (causal with 32 keys 294, 128 keys 302; 16 rows a warp 295, with 128 keys 289; one block of values 297). Two cubes share a
    // multiprocessor.
    split_m([64, 64], [4, 2, 64]),
    // 362 and 335; with copies that computed their places anew 330 (64 keys 341, all seen 369; with one block of values 326, one of either
    // 317; 16 rows a warp 295; 8 warps 306, of 16 rows 245). Two cubes share a multiprocessor.
    split_m([128, 128], [4, 2, 32]),
    // 347 and 328 (one place for P 340, 318; 64 × 64 a warp of the output 344, 326; chunks of half the columns 323, 308).
    split_d([256, 256], [128, 64, 4], [256, 64, 1, 3, 2]),
    // 327 and 312 (one place for P and five slots 320, 302).
    split_d([256, 256], [128, 64, 4], [128, 32, 1, 4, 2]),
    // 282 and 280; in 163 KB 64 keys 243, 238 (by columns, 64 rows and 64 keys, 217, 219; 128 rows with two slots of 16 keys 166, 151).
    split_m([256, 256], [4, 1, 32]),
    split_d([320, 320], [64, 128, 2], [128, 32, 1, 4, 2]),
    split_d([320, 320], [64, 128, 2], [64, 16, 1, 5, 2]),
    split_d([320, 320], [64, 64, 2], [64, 16, 1, 4, 2]),
    // 346 and 323 (one place for P 319, 304; eight slots of half the columns 304, 286).
    split_d([512, 512], [64, 128, 1], [128, 32, 1, 4, 2]),
    // 299 and 284 (one place for P and five slots 286, 272).
    split_d([512, 512], [64, 128, 1], [64, 16, 1, 4, 2]),
    // 249 and 245 (two slots and two places for P 146, 152; 32 rows whose queries stay 209, 171; 64 keys, values in two parts, 179, 168).
    without_queries(split_d([512, 512], [64, 128, 1], [64, 16, 1, 3, 1])),
    split_d([WIDEST_DOTS, 512], [64, 128, 1], [128, 32, 1, 4, 1]),
    split_d([WIDEST_DOTS, 512], [64, 128, 1], [64, 16, 1, 4, 1]),
    // Not measured. Queries that stay leave room for two slots, and with two D512 had 107, 96.
    without_queries(split_d([WIDEST_DOTS, 512], [64, 128, 1], [64, 16, 1, 3, 1])),
];

/// The widest queries and keys that leave room for a ring.
const WIDEST_DOTS: usize = 576;

/// The precision of the problem's operands, where the engine takes it on this device at all.
fn check(problem: &AttentionProblem, device: &DeviceProfile) -> Result<Half, Refusal> {
    let half = Half::of(problem.dtype).ok_or(Refusal::NotHalf(problem.dtype))?;
    device.require(Feature::CopyAsync)?;
    device.require(Feature::Mma(problem.dtype))?;
    device.require(Feature::LoadMatrix(problem.dtype))?;
    check_sizes(problem)?;
    Ok(half)
}

/// The kernel of the forward of `problem`, or why there is none; where `as_backward`, one that adds up dots in the backward's order.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
    as_backward: bool,
) -> Result<ForwardPlan, Refusal> {
    let half = check(problem, device)?;
    let AttentionProblem {
        head_dim,
        value_dim,
        ..
    } = *problem;
    let limits = [device.shared_memory, device.units_per_cube];
    let rows = problem.q_len * problem.group().max(1);
    let few_rows = match problem.quantized {
        true => Some(tiles_of_words(rows, problem, layouts, half, limits)?),
        false => few_rows_tiles(rows, head_dim, value_dim, half, limits),
    };
    let few_rows = few_rows.filter(|tiles| !as_backward || sums_as_backward(tiles));
    let tiles = match few_rows {
        Some(tiles) => tiles,
        None => forward_tiles(head_dim, value_dim, half, limits)?,
    };
    let heads = heads_of_tile(problem, tiles.rows());
    let query_tiles = query_tiles(problem, tiles.rows(), heads);
    check_mask(problem, [(Side::Queries, tiles.rows(), tiles.keys())])?;
    let multiprocessors = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS);
    let cubes = tiles.cubes_per_multiprocessor(device.shared_memory) * multiprocessors;
    let block = [tiles.rows(), tiles.keys_at_once()];
    let splits = match few_rows {
        Some(_) => splits_in_rounds(problem, block, query_tiles.all, cubes),
        None => splits(problem, block, query_tiles.all, cubes),
    };
    Ok(ForwardPlan {
        tiles,
        heads,
        splits,
        together: query_tiles.together,
        copies: layouts.tma.others(Pass::Forward),
    })
}

/// The tiles that read keys and values of int8 where they lie.
fn tiles_of_words(
    rows: usize,
    problem: &AttentionProblem,
    layouts: Layouts,
    half: Half,
    limits: [usize; 2],
) -> Result<ForwardTiles, Refusal> {
    // A copy of all of them costs more than another engine, which reads them as they lie.
    if !layouts.tma.key || !layouts.tma.value {
        return Err(Refusal::Quantized(
            "its rows of words are none of whole pieces of 16 bytes",
        ));
    }
    if half == Half::F16 {
        return Err(Refusal::Quantized(
            "a probability times its value's scale may be too large or too small for F16",
        ));
    }
    let tiles = word_tiles(rows, [problem.head_dim, problem.value_dim], limits);
    tiles.ok_or(Refusal::Quantized(
        "it has no tiles for so many rows of such a width",
    ))
}

/// The tiles for operands of this width that fit so many bytes of shared memory and units of a cube.
pub(crate) fn forward_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    [shared_memory, units]: [usize; 2],
) -> Result<ForwardTiles, Refusal> {
    let mut tiles = FORWARD
        .iter()
        .filter(|shape| shape.is_for(head_dim, value_dim))
        .map(|shape| shape.tiles(head_dim, value_dim, half))
        .peekable();
    if tiles.peek().is_none() {
        let (widest_head, widest_value) = FORWARD.last().map(Shape::widest).unwrap_or_default();
        return Err(Refusal::Width {
            widest_head,
            widest_value,
            head_dim,
            value_dim,
        });
    }
    let fits =
        |tiles: &ForwardTiles| tiles.shared_memory() <= shared_memory && tiles.units() <= units;
    tiles.find(fits).ok_or(Refusal::Tiles {
        width: value_dim,
        shared_memory,
        units,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::division::NARROWEST;
    use crate::testing::SHARED_MEMORY;
    use cube_kit::ampere::BARRIER_BYTES;
    use cube_kit::hopper::ROW_BYTES;

    /// Every width has a tile on every card, and every tile by columns divides as its kernel assumes.
    #[test]
    fn every_width_has_a_tile_that_divides_evenly() {
        for head_dim in NARROWEST..=WIDEST_DOTS {
            for value_dim in [head_dim.min(512), 8, 80, 257, 512] {
                for shared_memory in SHARED_MEMORY {
                    let tiles =
                        forward_tiles(head_dim, value_dim, Half::Bf16, [shared_memory, 256]);
                    if let ForwardTiles::SplitD(tiles) = tiles.expect("tiles") {
                        check_division(&tiles);
                    }
                }
            }
        }
    }

    pub(super) fn check_division(tiles: &SplitDTiles) {
        let context = format!("{tiles:?}");
        let warps = SplitDTiles::WARPS;
        let score_groups = tiles.rows / tiles.score_rows();
        assert_eq!(score_groups * tiles.key_groups(), warps, "{context}");
        assert!(tiles.score_fragments() <= 2, "{context}");
        assert_eq!(
            tiles.row_groups * tiles.output_rows(),
            tiles.rows,
            "{context}"
        );
        // The rows of a warp's output are whole groups of rows of scores: of a row group's warps, which meet among themselves.
        assert_eq!(tiles.output_rows() % tiles.score_rows(), 0, "{context}");
        assert_eq!(tiles.column_groups() % tiles.key_groups(), 0, "{context}");
        assert_eq!(tiles.column_groups() * tiles.row_groups, warps, "{context}");
        assert!(
            tiles.part_columns() * tiles.value_parts >= tiles.value_dim,
            "{context}"
        );
        // A block's used bits are a word's.
        assert!(tiles.keys <= 128, "{context}");
        assert_eq!(tiles.keys % tiles.value_keys, 0, "{context}");
        // A pass fills slots of itself and of the next one.
        assert!(
            tiles.slots >= 2 && tiles.slots <= tiles.chunks() + 1,
            "{context}"
        );
        assert!(
            tiles.vectors().iter().all(|&registers| registers <= 128),
            "{context}"
        );
        // The places of pieces are permuted by the rows' numbers among eight of 128 bytes.
        let ring = tiles.ring();
        let permuted = [
            tiles.probabilities_at(),
            tiles.probability_bytes(),
            ring.slots_at,
            ring.slot_bytes,
        ];
        assert!(
            permuted.iter().all(|at| at.is_multiple_of(8 * ROW_BYTES)),
            "{context}"
        );
        for barriers in [tiles.meetings_at(), ring.barriers_at] {
            assert!(barriers.is_multiple_of(BARRIER_BYTES), "{context}");
        }
    }
}
