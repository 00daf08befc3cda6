//! The plan of the `wgmma` engine, for NVIDIA's Hopper: tiles from tables by head size, and the shared
//! memory that they take.

use super::{DeviceProfile, Layouts, Pass, Refusal, unit::MAX_LENGTH};
use crate::AttentionProblem;
use burn::tensor::DType;

/// The half precisions that the matrix unit multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Half {
    /// Its name in PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    const fn of(dtype: DType) -> Option<Self> {
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

/// A vector of registers has a power of two of them.
const fn registers(used: usize) -> usize {
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

    /// Where the values end.
    const fn values_end(&self) -> usize {
        self.values_at() + self.stages * self.value_bytes()
    }

    const fn output_bytes(&self) -> usize {
        self.rows() * self.value_subtiles() * ROW_BYTES
    }

    /// Whether there is room beside the operands for an output on its way to memory. Then the next tile's
    /// queries can come while the output leaves.
    pub const fn has_output_place(&self) -> bool {
        self.values_end() + self.output_bytes() + SMALL_BYTES <= SHARED_MEMORY
    }

    /// Where the output goes through.
    pub const fn output_at(&self) -> usize {
        if self.has_output_place() {
            self.values_end()
        } else {
            0
        }
    }

    /// Where the barriers start: full and empty of every stage of keys, of values, and of the queries, and three
    /// of used keys.
    pub const fn barriers_at(&self) -> usize {
        if self.has_output_place() {
            self.values_end() + self.output_bytes()
        } else {
            self.values_end()
        }
    }

    /// Where the words start in which a bit stands for a key that somebody sees.
    pub const fn used_at(&self) -> usize {
        self.barriers_at() + 8 * (4 * self.stages + 5)
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

    /// Whether the output leaves through shared memory: its own place there or the queries'.
    pub const fn boxes_output(&self) -> bool {
        self.value_dim.is_multiple_of(16)
            && (self.has_output_place() || self.value_subtiles() <= self.key_subtiles())
    }

    /// Whether warpgroups issue their products in turns, so that one makes its softmax while the matrix unit is
    /// at another's products (FlashAttention-3's ping-pong).
    pub const fn takes_turns(&self) -> bool {
        self.warpgroups > 1
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

/// What the wgmma engine launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WgmmaPlan {
    /// The tiles.
    pub tiles: ForwardTiles,
    /// Query heads of a group that share a tile, one after the other; 1 where a tile has one head.
    pub heads: usize,
    /// Parts that the keys are split into; 1 writes the output at once.
    pub splits: usize,
    /// Heads, counted through the sequences, whose tiles are in flight together.
    pub together: usize,
    /// How tiles come to cubes.
    pub residence: Residence,
}

/// How tiles come to cubes. A cube that stays loads the next tile's first keys while the last one ends, but
/// nobody evens out what its tiles take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residence {
    /// A cube a tile, and the device hands them out, the heavy ones first.
    Leaves,
    /// This many cubes, and each takes every so many-th tile.
    Stays(usize),
    /// This many cubes, and each takes every so many-th pair of a tile and its mirror image in the sequence.
    StaysForPairs(usize),
}

/// The part of [`RowTiles`] that is chosen.
struct RowShape {
    /// The widest keys and values it is for.
    head_dim: usize,
    value_dim: usize,
    warpgroups: usize,
    keys: usize,
    stages: usize,
}

const fn row_shape(
    head_dim: usize,
    value_dim: usize,
    warpgroups: usize,
    keys: usize,
    stages: usize,
) -> RowShape {
    RowShape {
        head_dim,
        value_dim,
        warpgroups,
        keys,
        stages,
    }
}

/// By rows, the first that is wide enough.
const BY_ROWS: &[RowShape] = &[
    row_shape(64, 64, 3, 128, 2),
    row_shape(128, 128, 2, 128, 2),
    row_shape(192, 128, 2, 128, 2),
    row_shape(192, 192, 2, 112, 2),
    row_shape(256, 256, 2, 80, 2),
];

/// By columns: the widest keys, and how many stages fit beside them.
const BY_COLUMNS: &[(usize, usize)] = &[(512, 8), (576, 7)];

/// The widest values that two warpgroups hold by columns.
const WIDEST_VALUES: usize = 512;

/// Bytes of keys and values whose tiles are in flight together under a causal mask, where heads are
/// interleaved so that what starts last is short: they share the L2 cache.
const CACHE_BYTES: usize = 34 << 20;

/// Multiprocessors assumed where the runtime does not say.
const ASSUMED_MULTIPROCESSORS: usize = 132;

/// Blocks of keys that a part has at least where keys are split.
const BLOCKS_PER_SPLIT: usize = 2;

/// Tiles for `problem`, or why there are none.
pub fn plan(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
    pass: Pass,
) -> Result<WgmmaPlan, Refusal> {
    if !device.hopper {
        return Err(Refusal::NotHopper);
    }
    let half = Half::of(problem.dtype).ok_or(Refusal::NotHalf(problem.dtype))?;
    if pass == Pass::Backward {
        return Err(Refusal::NoBackward);
    }
    let length = problem.q_len.max(problem.kv_len);
    if length > MAX_LENGTH {
        return Err(Refusal::Length {
            length,
            limit: MAX_LENGTH,
        });
    }
    if !layouts.boxes {
        return Err(Refusal::Strides);
    }
    let tiles = forward_tiles(problem.head_dim, problem.value_dim, half).ok_or(Refusal::Width {
        head_dim: problem.head_dim,
        value_dim: problem.value_dim,
    })?;
    if tiles.shared_memory() > device.shared_memory || tiles.units() > device.units_per_cube {
        return Err(Refusal::Tiles {
            width: problem.value_dim,
            shared_memory: device.shared_memory,
            units: device.units_per_cube,
        });
    }

    let group = problem.group().max(1);
    // Two heads at least must fit for sharing a tile to save one.
    let heads = match tiles.rows() / problem.q_len.max(1) {
        0 | 1 => 1,
        heads => heads.min(group),
    };
    let (planes, tile_count) = match heads {
        1 => (
            problem.batch * problem.q_heads,
            problem.q_len.div_ceil(tiles.rows()),
        ),
        heads => (problem.batch * problem.kv_heads, group.div_ceil(heads)),
    };
    let splits = splits(problem, device, &tiles, planes * tile_count);
    Ok(WgmmaPlan {
        tiles,
        heads,
        splits,
        together: together(problem, planes, heads),
        residence: residence(problem, device, planes * tile_count * splits),
    })
}

/// The tiles for operands of this width.
pub(crate) fn forward_tiles(head_dim: usize, value_dim: usize, half: Half) -> Option<ForwardTiles> {
    let by_rows = BY_ROWS
        .iter()
        .find(|shape| head_dim <= shape.head_dim && value_dim <= shape.value_dim)
        .map(|shape| {
            ForwardTiles::Rows(RowTiles {
                head_dim,
                value_dim,
                half,
                warpgroups: shape.warpgroups,
                keys: shape.keys,
                stages: shape.stages,
            })
        });
    by_rows.or_else(|| {
        BY_COLUMNS
            .iter()
            .find(|(widest, _)| head_dim <= *widest && value_dim <= WIDEST_VALUES)
            .map(|(_, stages)| {
                ForwardTiles::Columns(ColumnTiles {
                    head_dim,
                    value_dim,
                    half,
                    stages: *stages,
                })
            })
    })
}

/// Parts of the keys, where there are fewer tiles than multiprocessors.
fn splits(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    tiles: &ForwardTiles,
    cubes: usize,
) -> usize {
    let multiprocessors = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS);
    let blocks = problem
        .visible_keys(tiles.rows())
        .div_ceil(tiles.keys())
        .div_ceil(BLOCKS_PER_SPLIT);
    (multiprocessors / cubes.max(1)).clamp(1, blocks.max(1))
}

/// Cubes stay where tiles, or pairs of them, are equally heavy.
fn residence(problem: &AttentionProblem, device: &DeviceProfile, cubes: usize) -> Residence {
    let multiprocessors = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS);
    if cubes <= multiprocessors || problem.kv_lengths || problem.segments {
        return Residence::Leaves;
    }
    let windowed = problem
        .window_left
        .is_some_and(|left| left <= problem.kv_len / 2);
    match problem.causal {
        None => Residence::Stays(multiprocessors),
        Some(_) if windowed => Residence::Leaves,
        Some(_) if problem.q_len <= problem.kv_len => Residence::StaysForPairs(multiprocessors),
        Some(_) => Residence::Leaves,
    }
}

/// Heads whose tiles alternate. Where all tiles are equally long, a head's own come one after the other.
fn together(problem: &AttentionProblem, planes: usize, heads: usize) -> usize {
    if problem.causal.is_none() {
        return 1;
    }
    let key_value_bytes = 2 * problem.kv_len * (problem.head_dim + problem.value_dim);
    let sharing = if heads == 1 {
        problem.group().max(1)
    } else {
        1
    };
    (CACHE_BYTES / key_value_bytes.max(1) * sharing).clamp(sharing, planes.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every width up to the limit has a tile, and every tile fits a Hopper GPU's shared memory.
    #[test]
    fn every_width_has_a_tile_that_fits() {
        for head_dim in 1..=576 {
            for value_dim in 1..=512 {
                let tiles = forward_tiles(head_dim, value_dim, Half::Bf16);
                let tiles = tiles.unwrap_or_else(|| panic!("no tiles for {head_dim}/{value_dim}"));
                assert!(tiles.shared_memory() <= 232_448, "{tiles:?}");
                if let ForwardTiles::Rows(rows) = tiles {
                    assert!(
                        rows.keys.is_multiple_of(16) && rows.keys <= 128,
                        "{tiles:?}"
                    );
                    assert!(rows.rows() <= 256, "{tiles:?}");
                }
            }
        }
    }
}
