//! The plan of the `mma` engine: tiles from tables by head size and by the shared memory that the device has.

mod few_rows;
mod gradient;
pub mod split_d;
pub mod split_m;
pub mod split_n;
pub mod warp;

pub(crate) use self::few_rows::few_rows_tiles;
pub(super) use self::gradient::backward;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use self::gradient::gradient_tiles;
pub use self::gradient::{
    BackwardPlan, GradientSplitDTiles, GradientSplitMTiles, GradientTiles, Held,
};
use self::split_d::SplitDTiles;
use self::split_m::SplitMTiles;
use self::split_n::SplitNTiles;
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

/// The part of [`SplitMTiles`] that is chosen.
struct SplitMShape {
    /// The widest keys and values it is for.
    head_dim: usize,
    value_dim: usize,
    warps: usize,
    fragments: usize,
    keys: usize,
}

const fn split_m(
    [head_dim, value_dim]: [usize; 2],
    [warps, fragments, keys]: [usize; 3],
) -> SplitMShape {
    SplitMShape {
        head_dim,
        value_dim,
        warps,
        fragments,
        keys,
    }
}

/// Split-M, the first that is wide enough and fits; in 99 KB all do. TFLOP/s on one H200 (2026-11-23), bf16, at 4,096 queries and keys,
/// causal: two cubes share a multiprocessor wherever they fit.
const SPLIT_M: &[SplitMShape] = &[
    // 301 (32 keys 294, 128 keys 302; 16 rows a warp 295, with 128 keys 289; one block of values 297).
    split_m([64, 64], [4, 2, 64]),
    // 360; with copies that computed their places anew 330 (64 keys 341, all seen 369; with one block of values 326, one of either 317;
    // 16 rows a warp 295; 8 warps 306, of 16 rows 245).
    split_m([128, 128], [4, 2, 32]),
];

/// The part of [`SplitDTiles`] that is chosen.
struct SplitDShape {
    /// The widest keys and values it is for.
    head_dim: usize,
    value_dim: usize,
    rows: usize,
    keys: usize,
    row_groups: usize,
    key_columns: usize,
    value_keys: usize,
    value_parts: usize,
    slots: usize,
}

const fn split_d(
    [head_dim, value_dim]: [usize; 2],
    [rows, keys, row_groups]: [usize; 3],
    [key_columns, value_keys, value_parts, slots]: [usize; 4],
) -> SplitDShape {
    SplitDShape {
        head_dim,
        value_dim,
        rows,
        keys,
        row_groups,
        key_columns,
        value_keys,
        value_parts,
        slots,
    }
}

/// Split-D, the first that is wide enough and fits: for 227, 163 and 99 KB. Chunks are as wide as there is room for: each costs a
/// meeting of all warps. TFLOP/s on one H200 (2026-11-23), bf16, all seen: D256 325, 301, 215 (by rows, 64 queries in 4 warps: 311); D512
/// 299, 258, 187; D320 at 8,192, causal, 249.
const SPLIT_D: &[SplitDShape] = &[
    split_d([256, 256], [128, 64, 4], [256, 64, 1, 3]),
    split_d([256, 256], [128, 64, 4], [128, 32, 1, 5]),
    split_d([256, 256], [64, 64, 2], [128, 32, 1, 3]),
    split_d([320, 320], [64, 128, 2], [128, 32, 1, 4]),
    split_d([320, 320], [64, 128, 2], [64, 16, 1, 5]),
    split_d([320, 320], [64, 64, 2], [64, 16, 1, 4]),
    split_d([512, 512], [64, 128, 1], [128, 32, 1, 4]),
    split_d([512, 512], [64, 128, 1], [64, 16, 1, 5]),
    split_d([512, 512], [64, 64, 1], [64, 16, 2, 3]),
    split_d([WIDEST_DOTS, 512], [64, 128, 1], [128, 32, 1, 4]),
    split_d([WIDEST_DOTS, 512], [64, 128, 1], [64, 16, 1, 4]),
    split_d([WIDEST_DOTS, 512], [64, 64, 1], [64, 16, 2, 2]),
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

/// The kernel of the forward of `problem`, or why there is none.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<ForwardPlan, Refusal> {
    let half = check(problem, device)?;
    let AttentionProblem {
        head_dim,
        value_dim,
        ..
    } = *problem;
    let limits = [device.shared_memory, device.units_per_cube];
    let rows = problem.q_len * problem.group().max(1);
    let few_rows = few_rows_tiles(rows, head_dim, value_dim, half, limits);
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

/// The tiles for operands of this width that fit so many bytes of shared memory and units of a cube.
pub(crate) fn forward_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    [shared_memory, units]: [usize; 2],
) -> Result<ForwardTiles, Refusal> {
    let by_rows = SPLIT_M
        .iter()
        .filter(|shape| head_dim <= shape.head_dim && value_dim <= shape.value_dim)
        .map(|shape| ForwardTiles::SplitM(shape.tiles(head_dim, value_dim, half)));
    let by_columns = SPLIT_D
        .iter()
        .filter(|shape| head_dim <= shape.head_dim && value_dim <= shape.value_dim)
        .map(|shape| ForwardTiles::SplitD(shape.tiles(head_dim, value_dim, half)));
    let mut tiles = by_rows.chain(by_columns).peekable();
    if tiles.peek().is_none() {
        let widest = SPLIT_D.last().map(|row| (row.head_dim, row.value_dim));
        let (widest_head, widest_value) = widest.unwrap_or_default();
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

impl SplitMShape {
    fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> SplitMTiles {
        SplitMTiles {
            head_dim,
            value_dim,
            half,
            warps: self.warps,
            fragments: self.fragments,
            keys: self.keys,
        }
    }
}

impl SplitDShape {
    fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> SplitDTiles {
        let tiles = SplitDTiles {
            head_dim,
            value_dim,
            half,
            rows: self.rows,
            keys: self.keys,
            row_groups: self.row_groups,
            key_columns: self.key_columns,
            value_keys: self.value_keys,
            value_parts: self.value_parts,
            slots: self.slots,
        };
        // Of narrow operands a pass has few chunks. It can fill slots of itself and of the next one.
        SplitDTiles {
            slots: tiles.slots.min(tiles.chunks() + 1),
            ..tiles
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::division::NARROWEST;

    /// Shared memory of an H100, an A100, and a GeForce.
    const SHARED_MEMORY: [usize; 3] = [232_448, 166_912, 101_376];

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

    fn check_division(tiles: &SplitDTiles) {
        let context = format!("{tiles:?}");
        let warps = SplitDTiles::WARPS;
        let score_groups = tiles.rows / tiles.score_rows();
        assert_eq!(score_groups * tiles.key_groups(), warps, "{context}");
        assert!(tiles.score_fragments() <= 2, "{context}");
        // The rows of a warp's output are whole groups of rows of scores, whose used keys it is told.
        assert_eq!(tiles.output_rows() % tiles.score_rows(), 0, "{context}");
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
    }
}
