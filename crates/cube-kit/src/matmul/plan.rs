//! The plan of a matrix product on Hopper: how wide its tiles are, and how they follow each other.

#[cfg(feature = "cuda")]
use crate::hopper::WARPGROUP;
use crate::hopper::{Half, PRODUCT_ROWS, ROW_BYTES, SUBTILE};

/// Which dimension of an operand lies together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Major {
    /// The one that is summed over.
    Inner,
    /// The operand's own: rows of the left one, columns of the right one.
    Outer,
}

/// What a kernel of matrix products is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MatrixTiles {
    /// Columns of a tile; a tile's rows are [`Self::ROWS`].
    pub columns: usize,
    /// Chunks of [`Self::DEPTH`] inner elements in flight.
    pub stages: usize,
    /// Of the left operand.
    pub lhs: Major,
    /// Of the right operand.
    pub rhs: Major,
    /// Of both operands.
    pub half: Half,
}

/// The widths of tiles, each with as many stages as fit beside the place that its output goes through.
const WIDTHS: [(usize, usize); 3] = [(256, 3), (128, 5), (64, 7)];

/// What a tile takes beside its product, in columns of one chunk: filling the ring, and the output.
const OVERHEAD: usize = 512;

/// A product of 64 rows reads its left operand from shared memory, too, and so is not faster below this width.
const LEAST_WIDTH: usize = 96;

/// Rows of tiles that are in flight together, so that tiles beside each other share what they read in the L2 cache.
#[cfg(feature = "cuda")]
pub(crate) const TOGETHER: usize = 16;

impl MatrixTiles {
    /// Rows of a tile: each of two warpgroups has 64.
    pub const ROWS: usize = Self::WARPGROUPS * PRODUCT_ROWS;
    /// Inner elements of a chunk.
    pub const DEPTH: usize = SUBTILE;
    /// Columns that tiles have at least.
    pub const NARROWEST: usize = SUBTILE;
    pub(crate) const WARPGROUPS: usize = 2;
    /// Threads of a cube: the warpgroups that multiply, and one that fetches.
    #[cfg(feature = "cuda")]
    pub(crate) const UNITS: usize = (Self::WARPGROUPS + 1) * WARPGROUP;
    pub(crate) const LHS_BYTES: usize = Self::ROWS * ROW_BYTES;

    /// The tiles that take the shortest time for `[rows, inner]` times `[inner, columns]`; where the columns are those of several matrices,
    /// of which the others begin at `starts`, no tile has columns of two. Those are multiples of [`Self::NARROWEST`].
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
        // The first of those that take as long.
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

    /// Where a warpgroup's output goes through.
    pub(crate) const fn output_bytes(&self) -> usize {
        PRODUCT_ROWS * 2 * self.columns
    }

    pub(crate) const fn output_at(&self) -> usize {
        self.stages * self.stage_bytes()
    }

    pub(crate) const fn barriers_at(&self) -> usize {
        self.output_at() + Self::WARPGROUPS * self.output_bytes()
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        self.barriers_at() + 16 * self.stages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a cube of Hopper has.
    const SHARED_MEMORY: usize = 232_448;

    #[test]
    fn tiles_fit() {
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
    fn narrow_where_wide_ones_leave_processors_idle() {
        let majors = [Major::Inner; 2];
        let width = |shape| MatrixTiles::choose(shape, &[], 132, majors, Half::Bf16).columns;
        assert_eq!(width([8192, 1536, 12288]), 256);
        assert_eq!(width([512, 1536, 256]), 64);
    }

    #[test]
    fn no_tile_has_columns_of_two_matrices() {
        let shape = [8192, 1536, 12288];
        for (starts, expected) in [([6144, 6400], 256), ([6144, 6272], 128), ([64, 6144], 64)] {
            let tiles = MatrixTiles::choose(shape, &starts, 132, [Major::Inner; 2], Half::Bf16);
            assert_eq!(tiles.columns, expected);
        }
    }
}
