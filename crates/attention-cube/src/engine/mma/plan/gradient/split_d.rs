//! Where things are in shared memory where warps divide a gradient's columns, and what each of them has.

use crate::engine::mma::plan::ring::Ring;
use crate::engine::mma::plan::split_m::STEP;
use crate::math::side::{Side, Sums};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::hopper::{Half, ROW_BYTES, SUBTILE, registers};

/// What of the tile stays in shared memory; the rest comes through the ring again for every block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Held {
    /// Dots, and values where these are needed.
    All,
    /// Dots alone.
    Dots,
    /// Nothing: a tile is no more than its rows of a gradient.
    Nothing,
}

/// Warps have parts of a block's scores by rows and columns, and of the gradient by columns: `backward/split_d.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientSplitDTiles {
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
    /// Numbers that come with a query: its logsumexp and Δ, or its reference, Δ, and the logarithm of the sum by the reference.
    pub terms: usize,
    /// Rows of a tile: 64 or 128.
    pub rows: usize,
    /// Rows of a block of the other side, the columns of the scores: 64 or 128.
    pub columns: usize,
    /// What of the tile stays.
    pub held: Held,
    /// Columns of a chunk of dots or values for the scores and the gradients of P, whole subtiles.
    pub score_columns: usize,
    /// Rows of a chunk of what is summed.
    pub sum_rows: usize,
    /// Slots of the ring, at least 2 and no more than a block has chunks.
    pub slots: usize,
}

impl GradientSplitDTiles {
    /// Warps of a cube.
    pub const WARPS: usize = 8;

    /// Threads of a cube.
    pub const UNITS: usize = 32 * Self::WARPS;

    /// Columns of a warp's scores: a word of a mask.
    pub const PART: usize = 32;

    /// Rows of a warp's gradient.
    pub const SUM_ROWS: usize = 64;

    /// Fragments of these.
    pub const SUM_FRAGMENTS: usize = Self::SUM_ROWS / FRAGMENT_ROWS;

    /// Blocks whose terms are in shared memory.
    pub const TERM_STAGES: usize = 2;

    /// Parts that a block's scores are divided into by columns.
    pub const fn part_groups(&self) -> usize {
        self.columns / Self::PART
    }

    /// Fragments of 16 rows that a warp has of the scores: 1 or 2.
    pub const fn score_fragments(&self) -> usize {
        self.rows * self.part_groups() / Self::WARPS / FRAGMENT_ROWS
    }

    /// Rows of a warp's scores.
    pub const fn score_rows(&self) -> usize {
        FRAGMENT_ROWS * self.score_fragments()
    }

    /// Gradients that are summed: the warps are divided among them.
    pub const fn gradients(&self) -> usize {
        match self.sums {
            Sums::Dots | Sums::Values => 1,
            Sums::Both => 2,
        }
    }

    /// Groups of rows that a gradient is divided into.
    pub const fn row_groups(&self) -> usize {
        self.rows / Self::SUM_ROWS
    }

    /// Warps that take turns at the columns of a gradient's rows.
    pub const fn column_groups(&self) -> usize {
        Self::WARPS / self.gradients() / self.row_groups()
    }

    /// Columns of the wider of the gradients.
    const fn width(&self) -> usize {
        match self.sums {
            Sums::Dots => self.head_dim,
            Sums::Values => self.value_dim,
            Sums::Both if self.head_dim < self.value_dim => self.value_dim,
            Sums::Both => self.head_dim,
        }
    }

    /// Times 16 columns that a warp has of a gradient.
    pub const fn steps(&self) -> usize {
        self.width().div_ceil(STEP * self.column_groups())
    }

    /// Subtiles of a gradient's columns, filled up with zeros to what all warps have.
    pub const fn sum_subtiles(&self) -> usize {
        (STEP * self.steps() * self.column_groups()).div_ceil(SUBTILE)
    }

    /// Chunks of a block's dots for the scores.
    pub const fn dot_chunks(&self) -> usize {
        self.head_dim.div_ceil(self.score_columns)
    }

    /// Chunks of a block's values for the gradients of P, where these are needed.
    pub const fn value_chunks(&self) -> usize {
        match self.sums.has_dots() {
            true => self.value_dim.div_ceil(self.score_columns),
            false => 0,
        }
    }

    /// Chunks of what is summed of a block.
    pub const fn sum_chunks(&self) -> usize {
        self.columns / self.sum_rows
    }

    /// Chunks of a block.
    pub const fn chunks(&self) -> usize {
        self.dot_chunks() + self.value_chunks() + self.sum_chunks()
    }

    /// Columns of the `chunk`-th chunk of an operand of this width, filled up with zeros to whole steps.
    pub const fn chunk_columns(&self, width: usize, chunk: usize) -> usize {
        let left = width.next_multiple_of(STEP) - chunk * self.score_columns;
        if left < self.score_columns {
            left
        } else {
            self.score_columns
        }
    }

    /// Whether the tile's dots stay, or, of the `values`, these.
    pub const fn holds(&self, values: bool) -> bool {
        match self.held {
            Held::All => true,
            Held::Dots => !values,
            Held::Nothing => false,
        }
    }

    /// Bytes of the dots that stay.
    const fn dot_bytes(&self) -> usize {
        match self.holds(false) {
            true => self.rows * self.head_dim.div_ceil(SUBTILE) * ROW_BYTES,
            false => 0,
        }
    }

    /// Bytes of the values that stay.
    const fn value_bytes(&self) -> usize {
        match self.sums.has_dots() && self.holds(true) {
            true => self.rows * self.value_dim.div_ceil(SUBTILE) * ROW_BYTES,
            false => 0,
        }
    }

    /// Where the values that stay start, behind the dots.
    pub const fn stationary_values_at(&self) -> usize {
        self.dot_bytes()
    }

    /// Where P or dS starts, of both dS.
    pub const fn factors_at(&self) -> usize {
        self.stationary_values_at() + self.value_bytes()
    }

    /// Bytes of P, and of dS.
    pub const fn factor_bytes(&self) -> usize {
        self.rows * self.columns / SUBTILE * ROW_BYTES
    }

    /// Where the ring starts.
    pub const fn ring_at(&self) -> usize {
        self.factors_at() + self.gradients() * self.factor_bytes()
    }

    /// Where in a chunk for scores or gradients of P the tile's own rows start, where these do not stay.
    pub const fn tile_rows_at(&self) -> usize {
        self.columns * self.score_columns / SUBTILE * ROW_BYTES
    }

    /// Where in a chunk of what is summed the values start, if both are.
    pub const fn sum_bytes(&self) -> usize {
        self.sum_rows * self.sum_subtiles() * ROW_BYTES
    }

    /// Bytes of a slot, which any chunk fits.
    pub const fn slot_bytes(&self) -> usize {
        let streams = !self.holds(false) || (self.sums.has_dots() && !self.holds(true));
        let rows = match streams {
            true => self.columns + self.rows,
            false => self.columns,
        };
        let scores = rows * self.score_columns / SUBTILE * ROW_BYTES;
        let sums = self.gradients() * self.sum_bytes();
        if scores < sums { sums } else { scores }
    }

    /// Bytes of the terms of a block's queries, in f32.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.terms * self.columns,
        }
    }

    /// Where the terms start.
    pub const fn terms_at(&self) -> usize {
        self.ring_at() + self.slots * self.slot_bytes()
    }

    /// Where the bits of used columns start, four words of each warp, of P or dS and then of P.
    pub const fn used_at(&self) -> usize {
        self.terms_at() + Self::TERM_STAGES * self.term_bytes()
    }

    /// Bytes of the bits of used columns of P, or dS.
    pub const USED_BYTES: usize = 16 * Self::WARPS;

    /// The ring, whose barriers lie behind everything else.
    pub const fn ring(&self) -> Ring {
        Ring {
            chunks: self.chunks(),
            slots: self.slots,
            slot_bytes: self.slot_bytes(),
            slots_at: self.ring_at(),
            barriers_at: self.used_at() + self.gradients() * Self::USED_BYTES,
        }
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        self.ring().end()
    }

    /// Threads of a cube, for whoever has tiles of either kind.
    pub const fn units(&self) -> usize {
        Self::UNITS
    }

    /// Sizes of the vectors of registers of S and dP, and P and dS, of a fragment and of all of a warp's; and of the gradient.
    pub const fn vectors(&self) -> [usize; 5] {
        let (s, p) = (Self::PART / 2, Self::PART / 4);
        let fragments = self.score_fragments();
        let gradient = Self::SUM_FRAGMENTS * self.steps() * STEP / 2;
        [s, p, fragments * s, fragments * p, registers(gradient)]
    }
}
