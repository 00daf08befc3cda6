//! The plan of a GEMM on Hopper: the width of its tiles, their order, and the layout of its shared memory.

#[cfg(feature = "cuda")]
use crate::hopper::gemm::mainloop::Mainloop;
use crate::hopper::{PRODUCT_ROWS, WARPGROUP};
use crate::nvidia::matrix::Major;
use crate::nvidia::{Half, ROW_BYTES, SUBTILE};

/// The dimension of a grouped GEMM that is divided into groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// The rows of the left operand. Each group has its own right operand.
    Rows,
    /// The inner dimension. Each group has its own result.
    Inner,
}

/// The compile-time settings of a GEMM kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixTiles {
    /// The number of columns per tile. A tile has [`Self::ROWS`] rows.
    pub columns: usize,
    /// The number of stages in the ring buffer. Each stage holds one chunk of [`Self::DEPTH`] inner elements.
    pub stages: usize,
    /// The dimension along which the left operand is contiguous.
    pub lhs: Major,
    /// The dimension along which the right operand is contiguous.
    pub rhs: Major,
    /// The precision of both operands.
    pub half: Half,
}

/// The widths of tiles in columns, each with the number of ring buffer stages that fit in shared memory beside the
/// output's staging area.
const WIDTHS: [(usize, usize); 3] = [(256, 3), (128, 5), (64, 7)];

/// The time, per tile, for filling the ring buffer and writing the output. The unit is the time to multiply one column
/// of one chunk.
const OVERHEAD: usize = 512;

/// The smallest tile width at which the multiplication limits the time of a wgmma. A narrower wgmma takes as long as a
/// wgmma of this width, because both read 64 rows of the left operand from shared memory.
const LEAST_WIDTH: usize = 96;

/// The number of tile rows (rows of the grid of tiles) that are in flight at the same time. Neighboring tiles read the
/// same parts of the operands. If these tiles are in flight at the same time, most of their reads hit the L2 cache.
#[cfg(feature = "cuda")]
pub(crate) const TOGETHER: usize = 16;

/// The layout of a cube's shared memory: the ring buffer, other data of the kernel, and then the barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingLayout {
    /// The number of stages in the ring buffer.
    pub stages: usize,
    /// The offset of the barriers in bytes.
    pub barriers_at: usize,
    /// The number of arrivals that free a stage. Each consumer warp arrives once.
    pub arrivals: usize,
}

impl RingLayout {
    /// The bytes of a stage's two barriers.
    pub const BARRIER_BYTES: usize = 16;

    /// Returns the bytes of shared memory per cube.
    pub const fn shared_memory(&self) -> usize {
        self.barriers_at + Self::BARRIER_BYTES * self.stages
    }
}

impl MatrixTiles {
    /// The number of rows per tile: 64 for each of two warpgroups.
    pub const ROWS: usize = Self::WARPGROUPS * PRODUCT_ROWS;
    /// The number of inner elements per chunk.
    pub const DEPTH: usize = SUBTILE;
    /// The number of columns of the narrowest tile.
    pub const NARROWEST: usize = SUBTILE;
    pub(crate) const WARPGROUPS: usize = 2;
    /// The number of threads per cube: two consumer warpgroups and one producer warpgroup.
    #[cfg(feature = "cuda")]
    pub(crate) const UNITS: usize = (Self::WARPGROUPS + 1) * WARPGROUP;
    pub(crate) const LHS_BYTES: usize = Self::ROWS * ROW_BYTES;

    /// Chooses the tiles with the shortest estimated time for `[rows, inner]` times `[inner, columns]`.
    ///
    /// `starts` lists the result columns at which the second and later right operands begin, all multiples of
    /// [`Self::NARROWEST`]. The chosen tile width divides each start, so that no tile contains columns of two operands.
    pub fn choose(
        [rows, inner, columns]: [usize; 3],
        starts: &[usize],
        multiprocessors: usize,
        [lhs, rhs]: [Major; 2],
        half: Half,
    ) -> Self {
        let chunks = inner.div_ceil(Self::DEPTH);
        let time = |width: usize| {
            let tiles = rows.div_ceil(Self::ROWS) * columns.div_ceil(width);
            tiles.div_ceil(multiprocessors) * (chunks * width.max(LEAST_WIDTH) + OVERHEAD)
        };
        let divides = |width: usize| starts.iter().all(|start| start.is_multiple_of(width));
        let widths = WIDTHS.into_iter().filter(|(width, _)| divides(*width));
        let [.., narrowest] = WIDTHS;
        // If several widths have the same time, `min_by_key` takes the first of these widths. The widths are in
        // descending order, so the first is the widest.
        let (columns, stages) = widths
            .min_by_key(|(width, _)| time(*width))
            .unwrap_or(narrowest);
        Self {
            columns,
            stages,
            lhs,
            rhs,
            half,
        }
    }

    pub(crate) const fn rhs_bytes(&self) -> usize {
        self.columns * ROW_BYTES
    }

    pub(crate) const fn stage_bytes(&self) -> usize {
        Self::LHS_BYTES + self.rhs_bytes()
    }

    /// Returns the bytes of a warpgroup's staging area for the output.
    pub(crate) const fn output_bytes(&self) -> usize {
        PRODUCT_ROWS * 2 * self.columns
    }

    pub(crate) const fn output_at(&self) -> usize {
        self.stages * self.stage_bytes()
    }

    pub(crate) const fn barriers_at(&self) -> usize {
        self.output_at() + Self::WARPGROUPS * self.output_bytes()
    }

    pub(crate) const fn ring(&self) -> RingLayout {
        RingLayout {
            stages: self.stages,
            barriers_at: self.barriers_at(),
            arrivals: WARPGROUP / 32 * Self::WARPGROUPS,
        }
    }

    #[cfg(feature = "cuda")]
    pub(crate) const fn mainloop(&self) -> Mainloop {
        Mainloop {
            row_tiles: 1,
            columns: self.columns,
            lhs: self.lhs,
            rhs: self.rhs,
            half: self.half,
            stages: self.stages,
            stage_bytes: self.stage_bytes(),
        }
    }

    /// Returns the bytes of shared memory per cube.
    pub const fn shared_memory(&self) -> usize {
        self.ring().shared_memory()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of shared memory per cube that Hopper allows.
    const SHARED_MEMORY: usize = 232_448;

    #[test]
    fn matrix_tiles_of_every_width_fit_shared_memory() {
        for (columns, stages) in WIDTHS {
            let tiles = MatrixTiles {
                columns,
                stages,
                lhs: Major::Inner,
                rhs: Major::Inner,
                half: Half::Bf16,
            };
            assert!(tiles.shared_memory() <= SHARED_MEMORY);
        }
    }

    #[test]
    fn choose_small_product_takes_narrow_tiles() {
        let majors = [Major::Inner; 2];
        let width = |shape| MatrixTiles::choose(shape, &[], 132, majors, Half::Bf16).columns;
        assert_eq!(width([8192, 1536, 12288]), 256);
        assert_eq!(width([512, 1536, 256]), 64);
    }

    #[test]
    fn choose_side_by_side_aligns_tiles_to_matrices() {
        let shape = [8192, 1536, 12288];
        for (starts, expected) in [([6144, 6400], 256), ([6144, 6272], 128), ([64, 6144], 64)] {
            let tiles = MatrixTiles::choose(shape, &starts, 132, [Major::Inner; 2], Half::Bf16);
            assert_eq!(tiles.columns, expected);
        }
    }
}
