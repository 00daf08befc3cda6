//! The tiles of the `wgmma` engine, and where things are in a cube's shared memory.

use burn::tensor::DType;

/// The half precisions that the matrix unit multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl ScoreProduct {
    /// Size of the product's vector of registers.
    pub const fn fragment(&self) -> usize {
        registers(self.right_rows / 2)
    }
}

impl Product {
    /// Sizes of the vectors of registers of the left operand, and of the product.
    pub const fn fragments(&self) -> [usize; 2] {
        [registers(self.depth / 4), registers(self.columns / 2)]
    }
}

impl Half {
    /// Its name in PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    pub(crate) const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }
}

/// Bytes of a row of a subtile, 64 halves: what the 128-byte swizzle permutes.
pub(crate) const ROW_BYTES: usize = 128;

/// Columns of a subtile.
pub(crate) const SUBTILE: usize = 64;

/// Rows of one matrix product.
pub(crate) const PRODUCT_ROWS: usize = 64;

/// Threads of a warpgroup.
pub(crate) const WARPGROUP: usize = 128;

/// Whether rows of so many columns are whole subtiles, which the copy engine then brings by one box.
pub(crate) const fn is_whole(columns: usize) -> bool {
    columns.is_multiple_of(SUBTILE)
}

/// Bytes of shared memory that a cube may take on Hopper.
const SHARED_MEMORY: usize = 232_448;

/// Bytes of it that suffice for barriers and the like.
const SMALL_BYTES: usize = 512;

/// A warpgroup's part of a tile's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OutputShape {
    /// Columns that the warpgroup has.
    pub columns: usize,
    /// Columns that the output has.
    pub value_dim: usize,
    /// From a subtile in shared memory to the next.
    pub subtile_bytes: usize,
    /// Nothing else is in its place there.
    pub own_place: bool,
    /// Its precision.
    pub half: Half,
}

/// `left · rightᵀ`, both in shared memory in subtiles of their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreProduct {
    /// Columns of both, which are summed over.
    pub depth: usize,
    /// Rows of a subtile of the left operand.
    pub left_rows: usize,
    /// Rows of the right operand: columns of the product.
    pub right_rows: usize,
    /// The precision of the operands.
    pub half: Half,
}

/// `left · right`, the left operand in registers, the right one in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the right operand, which are summed over.
    pub depth: usize,
    /// Columns of the product.
    pub columns: usize,
    /// The precision of the operands.
    pub half: Half,
}

/// A ring of stages that chunks of operands come through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingShape {
    /// Chunks in shared memory.
    pub stages: usize,
    /// Whether every operand of a block is whole rounds of the ring, and so starts at its first stage.
    pub whole_rounds: bool,
}

/// `left · rightᵀ`, 64 rows of either; the right operand comes by chunks of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkedScores {
    /// Columns of both, which are summed over.
    pub depth: usize,
    /// Chunks of the left operand that are in registers.
    pub register_chunks: usize,
    /// Size of their vector of registers.
    pub query_fragment: usize,
    /// Whether it frees a chunk of what was multiplied before.
    pub frees_before: bool,
    /// What the chunks come through.
    pub ring: RingShape,
    /// The precision of the operands.
    pub half: Half,
}

/// `left · right`; the right operand comes by chunks of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkedProduct {
    /// Columns of the product.
    pub columns: usize,
    /// What the chunks come through.
    pub ring: RingShape,
    /// The precision of the operands.
    pub half: Half,
}

impl ChunkedProduct {
    /// Size of the product's vector of registers.
    pub const fn fragment(&self) -> usize {
        registers(self.columns / 2)
    }
}

/// A vector of registers has a power of two of them.
pub(super) const fn registers(used: usize) -> usize {
    used.next_power_of_two()
}

/// Each warpgroup has 64 rows of queries and all columns of the output: `kernel/forward/by_rows.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Warpgroups that multiply.
    pub warpgroups: usize,
    /// Keys of a block.
    pub keys: usize,
    /// Blocks of keys, and blocks of values, in shared memory.
    pub stages: usize,
    /// Whether warpgroups issue their products in turns, so that one makes its softmax while the matrix unit is
    /// at another's products (FlashAttention-3's ping-pong).
    pub takes_turns: bool,
    /// Blocks of biases in shared memory; 0 where threads read them themselves.
    pub bias_stages: usize,
}

impl RowTiles {
    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        PRODUCT_ROWS * self.warpgroups
    }

    /// Threads of a cube: a warpgroup more than multiply fetches.
    pub const fn units(&self) -> usize {
        WARPGROUP * (self.warpgroups + 1)
    }

    /// Subtiles of a row of queries or keys.
    pub const fn key_subtiles(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Subtiles of a row of values.
    pub const fn value_subtiles(&self) -> usize {
        self.value_dim.div_ceil(SUBTILE)
    }

    /// Bytes of a block of keys.
    pub const fn key_bytes(&self) -> usize {
        self.keys * self.key_subtiles() * ROW_BYTES
    }

    /// Bytes of a block of values.
    pub const fn value_bytes(&self) -> usize {
        self.keys * self.value_subtiles() * ROW_BYTES
    }

    /// Where the blocks of keys start.
    pub const fn keys_at(&self) -> usize {
        self.rows() * self.key_subtiles() * ROW_BYTES
    }

    /// Where the blocks of values start.
    pub const fn values_at(&self) -> usize {
        self.keys_at() + self.stages * self.key_bytes()
    }

    /// Bytes of a block of biases: whole subtiles of its keys.
    pub const fn bias_bytes(&self) -> usize {
        self.rows() * self.bias_subtiles() * ROW_BYTES
    }

    /// Subtiles of a row of a block's biases.
    pub const fn bias_subtiles(&self) -> usize {
        self.keys.div_ceil(SUBTILE)
    }

    /// Where the blocks of biases start.
    pub const fn biases_at(&self) -> usize {
        self.values_at() + self.stages * self.value_bytes()
    }

    /// Where all blocks end.
    const fn blocks_end(&self) -> usize {
        self.biases_at() + self.bias_stages * self.bias_bytes()
    }

    const fn output_bytes(&self) -> usize {
        self.rows() * self.value_subtiles() * ROW_BYTES
    }

    /// Whether there is room beside the operands for an output on its way to memory. Then the next tile's
    /// queries can come while the output leaves.
    pub const fn has_output_place(&self) -> bool {
        self.blocks_end() + self.output_bytes() + SMALL_BYTES <= SHARED_MEMORY
    }

    /// Where the output goes through.
    pub const fn output_at(&self) -> usize {
        if self.has_output_place() {
            self.blocks_end()
        } else {
            0
        }
    }

    /// Where the barriers start: full and empty of every stage of keys, of values, and of the queries, three of used
    /// keys, and full and empty of every stage of biases.
    pub const fn barriers_at(&self) -> usize {
        if self.has_output_place() {
            self.blocks_end() + self.output_bytes()
        } else {
            self.blocks_end()
        }
    }

    /// Where the words start in which a bit stands for a key that somebody sees.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (4 * self.stages + 5 + 2 * self.bias_stages)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// Columns of the output in registers.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.next_multiple_of(8)
    }

    /// Sizes of the vectors of registers of S, of P and of O.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            registers(self.keys / 2),
            registers(self.keys / 4),
            registers(self.value_columns() / 2),
        ]
    }

    /// The product that makes S.
    pub const fn score_product(&self) -> ScoreProduct {
        ScoreProduct {
            depth: self.head_dim,
            left_rows: self.rows(),
            right_rows: self.keys,
            half: self.half,
        }
    }

    /// The product that adds to O.
    pub const fn output_product(&self) -> Product {
        Product {
            depth: self.keys,
            columns: self.value_columns(),
            half: self.half,
        }
    }

    /// Whether the output leaves through shared memory: its own place there or the queries'.
    pub const fn boxes_output(&self) -> bool {
        self.value_dim.is_multiple_of(16)
            && (self.has_output_place() || self.value_subtiles() <= self.key_subtiles())
    }

    /// What a warpgroup has of the output.
    pub const fn output_shape(&self) -> OutputShape {
        OutputShape {
            columns: self.value_columns(),
            value_dim: self.value_dim,
            subtile_bytes: self.rows() * ROW_BYTES,
            own_place: self.has_output_place(),
            half: self.half,
        }
    }

    /// Registers a thread of the warpgroup that fetches, and of those that multiply.
    pub const fn thread_registers(&self) -> [usize; 2] {
        match self.warpgroups {
            1 => [56, 256 - 16],
            2 => [24, 240],
            _ => [32, 160],
        }
    }
}

/// Words of used keys: 4 a block, for three blocks.
pub(crate) const USED_WORDS: usize = 12;

/// Registers a thread of the output, of scores and of queries together: the others need the rest.
const QUERY_REGISTERS: usize = 192;

/// Registers a thread of a chunk of queries: 64 rows and 64 columns of halves.
const QUERY_CHUNK_REGISTERS: usize = 16;

/// Each warpgroup has all rows and half of the output's columns: `kernel/forward/by_columns.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ColumnTiles {
    /// Columns of queries and keys.
    pub head_dim: usize,
    /// Columns of values.
    pub value_dim: usize,
    /// The precision of the operands.
    pub half: Half,
    /// Chunks in shared memory.
    pub stages: usize,
}

impl ColumnTiles {
    /// Queries of a tile.
    pub const ROWS: usize = PRODUCT_ROWS;
    /// Keys of a block: each warpgroup has half of its scores.
    pub const KEYS: usize = 128;
    /// Warpgroups that multiply.
    pub const WARPGROUPS: usize = 2;
    /// Threads of a cube.
    pub const UNITS: usize = WARPGROUP * (Self::WARPGROUPS + 1);
    /// Keys of a chunk of values.
    pub const VALUE_KEYS: usize = 32;
    /// Bytes of a stage: a chunk of keys has 64 columns of 128 keys.
    pub const STAGE_BYTES: usize = Self::KEYS * ROW_BYTES;
    /// Bytes of half of P: 64 rows and 64 keys.
    pub const HALF_BYTES: usize = PRODUCT_ROWS * ROW_BYTES;

    /// Chunks of a block of keys, which are subtiles of a row.
    pub const fn key_chunks(&self) -> usize {
        self.head_dim.div_ceil(SUBTILE)
    }

    /// Columns of the output that a warpgroup has.
    pub const fn value_columns(&self) -> usize {
        self.value_dim.div_ceil(2).next_multiple_of(8)
    }

    /// Subtiles of these.
    pub const fn value_subtiles(&self) -> usize {
        self.value_columns().div_ceil(SUBTILE)
    }

    /// Chunks of a block of values, one after the other for either warpgroup.
    pub const fn value_chunks(&self) -> usize {
        Self::WARPGROUPS * Self::KEYS / Self::VALUE_KEYS
    }

    /// Bytes of a chunk of values.
    pub const fn value_bytes(&self) -> usize {
        Self::VALUE_KEYS * ROW_BYTES * self.value_subtiles()
    }

    /// Whether the output leaves through the queries' place in shared memory: it must fit, and a warpgroup's
    /// part must not share a subtile with the other's.
    pub const fn boxes_output(&self) -> bool {
        self.value_columns().is_multiple_of(SUBTILE)
            && Self::WARPGROUPS * self.value_subtiles() <= self.key_chunks()
    }

    /// What a warpgroup has of the output.
    pub const fn output_shape(&self) -> OutputShape {
        OutputShape {
            columns: self.value_columns(),
            value_dim: self.value_dim,
            subtile_bytes: PRODUCT_ROWS * ROW_BYTES,
            own_place: false,
            half: self.half,
        }
    }

    /// Whether a chunk of values is one box.
    pub const fn has_whole_values(&self) -> bool {
        is_whole(self.value_dim) && is_whole(self.value_columns())
    }

    /// Whether a block's last chunk of values needs the stage of its first.
    pub const fn frees_first_chunk_at_once(&self) -> bool {
        self.value_chunks() > self.stages
    }

    /// Where the stages start.
    pub const fn stages_at(&self) -> usize {
        Self::ROWS * self.key_chunks() * ROW_BYTES
    }

    /// Where P's two buffers start.
    pub const fn probabilities_at(&self) -> usize {
        self.stages_at() + self.stages * Self::STAGE_BYTES
    }

    /// Where the two buffers start in which the warpgroups tell each other 64 numbers each.
    pub const fn exchange_at(&self) -> usize {
        self.probabilities_at() + 4 * Self::HALF_BYTES
    }

    /// Where the barriers start: full and empty of every stage, and of the queries.
    pub const fn barriers_at(&self) -> usize {
        self.exchange_at() + 4 * 4 * Self::ROWS
    }

    /// Where the words start in which a bit stands for a key that somebody sees.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (2 * self.stages + 2)
    }

    /// Bytes of shared memory.
    pub const fn shared_memory(&self) -> usize {
        (self.used_at() + 4 * USED_WORDS).next_multiple_of(16)
    }

    /// Chunks of the queries that stay in registers, as far as these go: shared memory is the bound, and has
    /// each chunk read twice a block.
    pub const fn register_chunks(&self) -> usize {
        let free = QUERY_REGISTERS - Self::KEYS / 4 - self.value_columns() / 2;
        let fit = free / QUERY_CHUNK_REGISTERS;
        if fit < self.key_chunks() {
            fit
        } else {
            self.key_chunks()
        }
    }

    /// Size of their vector of registers.
    pub const fn query_fragment(&self) -> usize {
        registers(QUERY_CHUNK_REGISTERS * self.register_chunks())
    }

    /// Whether blocks of keys and of values are whole rounds of the ring.
    pub const fn has_whole_rounds(&self) -> bool {
        self.key_chunks().is_multiple_of(self.stages)
            && self.value_chunks().is_multiple_of(self.stages)
    }

    /// The ring of chunks of keys and of values.
    pub const fn ring(&self) -> RingShape {
        RingShape {
            stages: self.stages,
            whole_rounds: self.has_whole_rounds(),
        }
    }

    /// The product that makes S.
    pub const fn chunked_scores(&self) -> ChunkedScores {
        ChunkedScores {
            depth: self.head_dim,
            register_chunks: self.register_chunks(),
            query_fragment: self.query_fragment(),
            frees_before: false,
            ring: self.ring(),
            half: self.half,
        }
    }

    /// Sizes of the vectors of registers of S, of the first queries, and of O.
    pub const fn fragments(&self) -> [usize; 3] {
        [
            Self::KEYS / 4,
            self.query_fragment(),
            self.output_fragment(),
        ]
    }

    /// Size of the vector of registers of O.
    pub const fn output_fragment(&self) -> usize {
        registers(self.value_columns() / 2)
    }
}

/// How the warpgroups of a cube divide a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardTiles {
    /// By rows of queries.
    Rows(RowTiles),
    /// By columns of the output.
    Columns(ColumnTiles),
}

impl ForwardTiles {
    /// Queries of a tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.rows(),
            Self::Columns(_) => ColumnTiles::ROWS,
        }
    }

    /// Keys of a block.
    pub const fn keys(&self) -> usize {
        match self {
            Self::Rows(tiles) => tiles.keys,
            Self::Columns(_) => ColumnTiles::KEYS,
        }
    }

    /// Whether the copy engine writes the output, where every tile has one head and no part.
    pub const fn boxes_output(&self) -> bool {
        match self {
            Self::Rows(tiles) => tiles.boxes_output(),
            Self::Columns(tiles) => tiles.boxes_output(),
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
