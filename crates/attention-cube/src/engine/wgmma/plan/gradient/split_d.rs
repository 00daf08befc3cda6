//! Where things are in shared memory where either warpgroup has half of a gradient's columns.

use crate::engine::wgmma::plan::tiles::{
    ChunkedProduct, ChunkedScores, OutputShape, RingShape, SplitDTiles, USED_WORDS,
};
use crate::math::side::{Side, Sums};
use cube_kit::hopper::{Half, PRODUCT_ROWS, ROW_BYTES, SUBTILE, is_whole};

/// Both warpgroups have the same 64 rows, and each has half of the columns of their gradient:
/// `backward/split_d.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GradientSplitDTiles {
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
    /// Numbers that come with a query: its logsumexp and Δ, or its reference, Δ, and the logarithm of the sum by the reference.
    pub terms: usize,
    /// Chunks in shared memory.
    pub stages: usize,
}

impl GradientSplitDTiles {
    /// Rows of a tile.
    pub const ROWS: usize = SplitDTiles::ROWS;
    /// Rows of a block of the other side: each warpgroup has half of the scores' columns.
    pub const COLUMNS: usize = SplitDTiles::KEYS;
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
        SplitDTiles::WARPGROUPS * SplitDTiles::KEYS / SplitDTiles::VALUE_KEYS
    }

    /// Bytes of such a chunk.
    pub const fn sum_bytes(&self) -> usize {
        SplitDTiles::VALUE_KEYS * ROW_BYTES * self.own_subtiles()
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
    pub const fn stationary_dot_bytes(&self) -> usize {
        Self::ROWS * self.dot_chunks() * ROW_BYTES
    }

    /// Bytes of the values that are held, where these are needed.
    pub const fn stationary_value_bytes(&self) -> usize {
        if self.sums.has_dots() {
            Self::ROWS * self.value_chunks() * ROW_BYTES
        } else {
            0
        }
    }

    /// Bytes of the queries' terms that come with a block of these, in f32.
    pub const fn term_bytes(&self) -> usize {
        match self.side {
            Side::Queries => 0,
            Side::Keys => 4 * self.terms * Self::COLUMNS,
        }
    }

    /// Where the stages start.
    pub const fn stages_at(&self) -> usize {
        self.stationary_dot_bytes() + self.stationary_value_bytes()
    }

    /// Where P, or dS, goes.
    pub const fn factors_at(&self) -> usize {
        self.stages_at() + self.stages * SplitDTiles::STAGE_BYTES
    }

    /// Where the terms start.
    pub const fn terms_at(&self) -> usize {
        self.factors_at() + 2 * SplitDTiles::HALF_BYTES
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
    pub const fn stores_gradient_by_tma(&self) -> bool {
        self.own_columns().is_multiple_of(SUBTILE)
            && self.width().is_multiple_of(8)
            && SplitDTiles::WARPGROUPS * self.own_subtiles() <= self.dot_chunks()
    }

    /// What a warpgroup has of the gradient.
    pub const fn output_shape(&self) -> OutputShape {
        OutputShape {
            columns: self.own_columns(),
            width: self.width(),
            stored_by_tma: self.stores_gradient_by_tma(),
            subtile_bytes: PRODUCT_ROWS * ROW_BYTES,
            own_place: true,
            half: self.half,
        }
    }
}
