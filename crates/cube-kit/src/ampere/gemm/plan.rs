//! The plan of a GEMM: the width of its tiles, and the number of splits of its inner dimension (split-K).

use super::super::FRAGMENT_ROWS;
use crate::nvidia::matrix::Major;
use crate::nvidia::{Half, SUBTILE};

/// The compile-time settings of a GEMM kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tiles {
    /// The number of columns per tile. A tile has [`Self::ROWS`] rows.
    pub columns: usize,
    /// The number of warps that divide the columns of a tile among them.
    pub warps: usize,
    /// The number of stages in the ring buffer. Each stage holds one chunk of both operands.
    pub stages: usize,
    /// The dimension along which the left operand is contiguous.
    pub lhs: Major,
    /// The dimension along which the right operand is contiguous.
    pub rhs: Major,
    /// The precision of both operands.
    pub half: Half,
    /// True if the inner dimension is split. The kernel then writes sums in f32, one matrix for each split.
    pub is_split: bool,
}

/// The shape of the tiles without the layout of the operands.
#[derive(Clone, Copy)]
struct Width {
    columns: usize,
    warps: usize,
    stages: usize,
    /// The time to multiply a chunk. The unit is the time in which the tensor cores multiply one column of a chunk,
    /// about 3 clocks of an H200. The narrowest tile is bound by shared memory: 288 clocks.
    time: usize,
}

/// The widths of tiles. With these numbers of stages, a cube's ring buffer takes 96, 48 and 48 KB. Consumer GPUs have
/// 99 KB per multiprocessor, so one cube of the first width fits, or two of the others.
const WIDTHS: [Width; 3] = [
    Width {
        columns: 256,
        warps: 4,
        stages: 4,
        time: 256,
    },
    Width {
        columns: 128,
        warps: 2,
        stages: 3,
        time: 128,
    },
    Width {
        columns: 64,
        warps: 2,
        stages: 4,
        time: 92,
    },
];

/// The numbers of splits that a plan may choose.
const SPLITS: [usize; 11] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64];

/// The smallest number of chunks per split.
const LEAST_CHUNKS: usize = 8;

/// The time, per tile, for filling the ring buffer and writing the output, in the unit of [`Width::time`].
const OVERHEAD: usize = 1024;

/// The time of the launch that adds up the splits, in the unit of [`Width::time`].
const SPLIT_LAUNCH: usize = 1500;

/// The number of f32 sums that the card writes and reads again in the unit of [`Width::time`].
const SUMS_PER_UNIT: usize = 900;

impl Tiles {
    /// The number of rows per tile.
    pub const ROWS: usize = 128;
    /// The number of rows per warp.
    pub const WARP_ROWS: usize = 64;
    /// The number of inner elements per chunk.
    pub const DEPTH: usize = 32;
    /// The number of warps that divide the rows of a tile among them.
    const ROW_WARPS: usize = Self::ROWS / Self::WARP_ROWS;
    /// The number of 16-row fragments per warp.
    pub const FRAGMENTS: usize = Self::WARP_ROWS / FRAGMENT_ROWS;

    /// Chooses the tiles and the number of splits with the shortest estimated time for `[rows, inner]` times
    /// `[inner, columns]`.
    pub fn choose(
        [rows, inner, columns]: [usize; 3],
        multiprocessors: usize,
        [lhs, rhs]: [Major; 2],
        half: Half,
    ) -> (Self, usize) {
        let chunks = inner.div_ceil(Self::DEPTH);
        let time = |width: Width, splits: usize| {
            let tiles = rows.div_ceil(Self::ROWS) * columns.div_ceil(width.columns) * splits;
            let of_tile = chunks.div_ceil(splits) * width.time + OVERHEAD;
            let reduce = match splits {
                1 => 0,
                _ => SPLIT_LAUNCH + splits * rows * columns / SUMS_PER_UNIT,
            };
            tiles.div_ceil(multiprocessors) * of_tile + reduce
        };
        let is_long = |splits: &usize| *splits == 1 || chunks >= splits * LEAST_CHUNKS;
        // If several plans have the same time, `min_by_key` takes the first of them. The widths are in descending
        // order, so the first is the widest, with the fewest splits.
        let plans = WIDTHS
            .into_iter()
            .flat_map(|width| SPLITS.map(|splits| (width, splits)))
            .filter(|(_, splits)| is_long(splits));
        let (width, splits) = plans
            .min_by_key(|(width, splits)| time(*width, *splits))
            .unwrap_or((WIDTHS[0], 1));
        let tiles = Self {
            is_split: splits > 1,
            ..Self::of(width, [lhs, rhs], half)
        };
        (tiles, splits)
    }

    fn of(width: Width, [lhs, rhs]: [Major; 2], half: Half) -> Self {
        Self {
            columns: width.columns,
            warps: width.warps,
            stages: width.stages,
            lhs,
            rhs,
            half,
            is_split: false,
        }
    }

    /// Returns the tiles of all widths, without splits.
    #[cfg(test)]
    pub fn all(majors: [Major; 2], half: Half) -> [Self; 3] {
        WIDTHS.map(|width| Self::of(width, majors, half))
    }

    /// The number of threads per cube.
    pub const fn units(&self) -> usize {
        32 * Self::ROW_WARPS * self.warps
    }

    /// The number of columns per warp.
    pub const fn warp_columns(&self) -> usize {
        self.columns / self.warps
    }

    /// The number of `mma.sync` columns per warp: groups of 8 columns.
    pub const fn groups(&self) -> usize {
        self.warp_columns() / 8
    }

    /// The bytes of the left operand in a stage.
    pub const fn lhs_bytes(&self) -> usize {
        2 * Self::ROWS * Self::DEPTH
    }

    /// The bytes of a stage: a chunk of both operands.
    pub const fn stage_bytes(&self) -> usize {
        self.lhs_bytes() + 2 * self.columns * Self::DEPTH
    }

    /// The bytes of shared memory per cube: the ring buffer. The output is staged in the same memory.
    pub const fn shared_memory(&self) -> usize {
        let ring = self.stages * self.stage_bytes();
        let output = 2 * Self::ROWS * self.columns;
        if ring > output { ring } else { output }
    }

    /// The number of 64-column subtiles of the output.
    pub const fn subtiles(&self) -> usize {
        self.columns / SUBTILE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(shape: [usize; 3]) -> (Tiles, usize) {
        Tiles::choose(shape, 132, [Major::Inner; 2], Half::Bf16)
    }

    #[test]
    fn tiles_of_every_width_fit_shared_memory() {
        for shape in [[8192, 1536, 12_288], [512, 1536, 1536], [64, 1536, 64]] {
            let (tiles, _) = of(shape);
            assert!(tiles.shared_memory() <= 99 << 10, "{tiles:?}");
        }
    }

    #[test]
    fn choose_large_product_takes_wide_tiles() {
        let (tiles, splits) = of([8192, 1536, 12_288]);
        assert_eq!((tiles.columns, splits, tiles.is_split), (256, 1, false));
    }

    #[test]
    fn choose_long_inner_dimension_splits_it() {
        // The gradient of a LoRA factor: few outputs, and as many inner elements as a batch has tokens.
        let (tiles, splits) = of([16, 8192, 1536]);
        assert!(splits > 1 && tiles.is_split, "{tiles:?}, {splits}");
        assert_eq!(of([128, 64, 64]).1, 1);
    }
}
