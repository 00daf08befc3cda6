//! The unit engine's plan: tiles from a table, by the width of the output and the device's shared memory.

use crate::AttentionProblem;
use crate::device::{ASSUMED_MULTIPROCESSORS, DeviceProfile, SOFTWARE_ITERATIONS};
use crate::select::{BackwardRequest, Layouts, MAX_LENGTH, Pass, Refusal};
use crate::tile::tiles::UnitTiles;

/// Tiles of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardPlan {
    /// The tiles.
    pub tiles: UnitTiles,
    /// The heads of a group share a tile.
    pub packed: bool,
    /// Parts that the keys are split into; 1 writes the output at once.
    pub splits: usize,
}

/// Tiles of a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardPlan {
    /// For the query's gradient, and the bias's.
    pub query: UnitTiles,
    /// For the keys' and the values'.
    pub key_value: UnitTiles,
    /// One kernel gives all three gradients, with the tiles of the keys', and with the query's in so many
    /// parts; `None` where the query's has a kernel of its own.
    pub parts: Option<usize>,
    /// For the bias's, if there is one.
    pub bias: Option<BiasSum>,
}

/// A kernel that gives gradients of query, keys or values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientKernel {
    /// The query's.
    Query,
    /// The keys' and the values'.
    KeyValue,
    /// As many of all three as are asked for, the query's in so many parts.
    Together {
        /// Of the query's.
        parts: usize,
    },
}

impl BackwardPlan {
    /// The kernels that are launched for the gradients asked for.
    pub fn kernels(&self, request: BackwardRequest) -> Vec<GradientKernel> {
        let pairs = request.key || request.value;
        let kernels = match self.parts {
            Some(parts) => [
                (request.query || pairs).then_some(GradientKernel::Together { parts }),
                None,
            ],
            None => [
                request.query.then_some(GradientKernel::Query),
                pairs.then_some(GradientKernel::KeyValue),
            ],
        };
        kernels.into_iter().flatten().collect()
    }
}

/// How the gradient of a bias is summed. What too few cubes would sum alone is summed in parts, and then these, always in the
/// same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BiasSum {
    /// Over the tiles of scores that a tile of the bias is broadcast along.
    Scores {
        /// Of each tile of the bias.
        parts: usize,
    },
    /// Over the queries, whatever they see: a bias that is the same for all keys.
    Queries {
        /// Of each number of the bias.
        parts: usize,
    },
}

/// Where things are in the two buffers of the kernel that gives all gradients, in elements of f32: one has the operands,
/// the query first, the other the gradients, the parts of the query's first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packing {
    /// From a row of the query or of a key to the next.
    pub head_pitch: usize,
    /// From a row of a value or of the output's gradient to the next.
    pub value_pitch: usize,
    pub key: usize,
    pub value: usize,
    pub output_gradient: usize,
    /// Elements of all operands.
    pub operands: usize,
    /// Elements of a part of the query's gradient.
    pub query_gradient: usize,
    pub key_gradient: usize,
    pub value_gradient: usize,
    /// Elements of all gradients.
    pub gradients: usize,
}

impl Packing {
    /// Of `problem`, with the query's gradient in `parts`.
    pub fn new(problem: &AttentionProblem, parts: usize) -> Self {
        let AttentionProblem {
            head_dim,
            value_dim,
            ..
        } = *problem;
        let (head_pitch, value_pitch) = (pitch(head_dim), pitch(value_dim));
        let q_rows = problem.batch * problem.q_heads * problem.q_len;
        let kv_rows = problem.batch * problem.kv_heads * problem.kv_len;
        let key = q_rows * head_pitch;
        let value = key + kv_rows * head_pitch;
        let output_gradient = value + kv_rows * value_pitch;
        let query_gradient = q_rows * head_dim;
        let key_gradient = parts * query_gradient;
        let value_gradient = key_gradient + kv_rows * head_dim;
        Self {
            head_pitch,
            value_pitch,
            key,
            value,
            output_gradient,
            operands: output_gradient + q_rows * value_pitch,
            query_gradient,
            key_gradient,
            value_gradient,
            gradients: value_gradient + kv_rows * value_dim,
        }
    }

    /// Whether the device has room for either buffer.
    fn fits(&self, device: &DeviceProfile) -> bool {
        self.operands.max(self.gradients) <= device.largest_buffer / size_of::<f32>()
    }
}

/// Elements from one row of an operand to the next: an odd number of the processor's cache lines, so that
/// the rows that are read side by side do not all take each other's place in the cache.
fn pitch(columns: usize) -> usize {
    const LINE: usize = 16;
    (columns.div_ceil(LINE) | 1) * LINE
}

/// The part of [`UnitTiles`] that is chosen; the rest follows from the output's width.
struct Shape {
    /// The widest output it is for.
    width: usize,
    units: usize,
    rows: usize,
    column_units: usize,
    column_vectors: usize,
    depth: usize,
    direct: bool,
}

const fn shape(
    width: usize,
    units: usize,
    rows: usize,
    column_units: usize,
    depth: usize,
) -> Shape {
    Shape {
        width,
        units,
        rows,
        column_units,
        column_vectors: 1,
        depth,
        direct: false,
    }
}

/// A shape that reads the operands where they lie.
const fn direct(
    width: usize,
    units: usize,
    rows: usize,
    column_units: usize,
    column_vectors: usize,
) -> Shape {
    Shape {
        width,
        units,
        rows,
        column_units,
        column_vectors,
        depth: 4,
        direct: true,
    }
}

// Rows that read the operands where they lie are for software drivers: GFLOP/s on Mesa's llvmpipe, two
// threads, f32, 2 heads of length 256. Narrow outputs have small tiles there, since the driver takes longer
// to compile a kernel than to run it.
//
// TFLOP/s beside the other rows: one H200, f32, causal, length 4096, heads × head_dim = 2048, 2026-11-20, before
// the scores were summed by chunks; the others that were tried at that width in brackets. Rows for 32 KB
// and less were chosen on Mesa's llvmpipe, where 64 units with 4 × 4 of S each ran at twice the speed of
// 256 units with 2 × 4.

/// Output in registers once: the forward and the query's gradient. The first row that is wide enough
/// and fits the device is taken.
const SINGLE: &[Shape] = &[
    direct(32, 64, 32, 8, 1),
    direct(512, 64, 64, 8, 2), // D512 full 11.4 GFLOP/s (staged, 4 × 4 of S a unit: 3.2)
    direct(1024, 64, 32, 8, 2),
    // Cards
    shape(128, 256, 64, 16, 32), // D64 24.9 (20.1–25.5), D128 24.9 (17.2–24.6)
    shape(256, 256, 64, 16, 16), // 23.0 (10.8–19.5; depth 32: 18.0)
    shape(512, 512, 64, 32, 32), // 19.8 (9.1–18.1)
    // 48 KB
    shape(512, 256, 32, 32, 32), // 16.8
    shape(1024, 512, 32, 32, 32),
    // 32 KB
    shape(256, 64, 32, 8, 32),
    shape(512, 256, 32, 16, 32), // 10.5
    shape(1024, 256, 16, 16, 32),
    // 16 KB
    shape(512, 64, 32, 8, 32),
    shape(1024, 128, 8, 16, 16),
];

/// Output in registers twice: the gradients of keys and values. TFLOP/s are of the whole backward.
const DOUBLE: &[Shape] = &[
    direct(32, 64, 32, 8, 1),
    direct(512, 64, 64, 8, 2), // D512 full 10.7 GFLOP/s (staged: 1.6)
    direct(1024, 64, 32, 8, 2),
    // Cards
    shape(64, 256, 64, 16, 32),  // 16.1 (13.9–16.2)
    shape(128, 128, 64, 16, 32), // 15.0 (12.9–14.7)
    shape(256, 512, 64, 32, 32), // 12.8 (9.7–11.8)
    // 48 KB
    shape(256, 256, 64, 16, 32), // 11.8
    shape(512, 512, 32, 32, 32), // 9.1 (6.9–9.0)
    shape(1024, 512, 16, 32, 32),
    // 32 KB
    shape(128, 64, 32, 8, 32),
    shape(256, 128, 32, 16, 32), // 11.3
    shape(512, 256, 32, 16, 32), // 8.3
    shape(1024, 256, 8, 32, 32),
    // 16 KB
    shape(256, 64, 32, 8, 32),
    shape(1024, 128, 8, 16, 16),
];

/// All gradients together, on software drivers: a square tile, and none of the output in registers.
/// Wide heads pay for 16 × 16 of S a unit, which the driver takes longer to compile: D512 full 88 ms of processor
/// time (8 × 8 of S: 112, separate operators: 105).
const TOGETHER: &[Shape] = &[
    direct(32, 64, 32, 8, 1),
    direct(128, 64, 64, 8, 2),
    direct(1024, 16, 64, 4, 4),
];

/// Few rows: decoding, where reading the keys bounds everything.
const DECODE: &[Shape] = &[
    // Direct as the backward is: the scores are then the same bit by bit, which shows where they are large.
    direct(1024, 64, 16, 16, 1),
    direct(1024, 64, 32, 8, 1),
    // Cards
    shape(1024, 256, 8, 32, 32),
    shape(1024, 256, 16, 16, 32),
    shape(512, 256, 32, 16, 32),
    // 16 KB
    shape(1024, 128, 8, 16, 16),
    shape(512, 128, 16, 8, 32),
];

/// Rows up to which the heads of a group share a tile.
const DECODE_ROWS: usize = 32;

/// Parts of the query's gradient up to which they are worth their memory.
const MAX_PARTS: usize = 4;

/// Cubes a multiprocessor that decoding splits its keys for.
const CUBES_PER_MULTIPROCESSOR: usize = 2;

/// Cubes a multiprocessor that the bias's gradient is divided among.
const BIAS_CUBES_PER_MULTIPROCESSOR: usize = 8;

/// Refuses what no kernel of the engine takes.
fn check(problem: &AttentionProblem, device: &DeviceProfile, pass: Pass) -> Result<(), Refusal> {
    if !device.dtypes.contains(&problem.dtype) {
        return Err(Refusal::Dtype(problem.dtype));
    }
    let length = problem.q_len.max(problem.kv_len);
    if length > MAX_LENGTH {
        return Err(Refusal::Length {
            length,
            limit: MAX_LENGTH,
        });
    }
    let needed = bindings(problem, pass);
    if needed > device.bindings {
        return Err(Refusal::Bindings {
            needed,
            available: device.bindings,
        });
    }
    Ok(())
}

/// Refuses what a software driver would end before its end.
fn check_iterations(needed: usize, device: &DeviceProfile) -> Result<(), Refusal> {
    if device.processors.is_some() && needed > SOFTWARE_ITERATIONS {
        return Err(Refusal::Iterations {
            needed,
            limit: SOFTWARE_ITERATIONS,
        });
    }
    Ok(())
}

/// Elements of a global load.
fn vector(problem: &AttentionProblem, layouts: Layouts) -> usize {
    let fours = problem.head_dim.is_multiple_of(4) && problem.value_dim.is_multiple_of(4);
    if layouts.vectors && fours { 4 } else { 1 }
}

/// The kernel of the forward of `problem`, or why there is none.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<ForwardPlan, Refusal> {
    check(problem, device, Pass::Forward)?;
    let plan = forward_tiles(problem, device, vector(problem, layouts))?;
    let blocks = problem.kv_len.div_ceil(plan.tiles.columns());
    let needed = blocks.div_ceil(plan.splits) * block_iterations(&plan.tiles, problem.head_dim);
    check_iterations(needed, device)?;
    Ok(plan)
}

/// The kernels of the backward of `problem`, or why there are none.
pub(crate) fn backward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
) -> Result<BackwardPlan, Refusal> {
    check(problem, device, Pass::Backward)?;
    let vector = vector(problem, layouts);
    let width = problem.head_dim.max(problem.value_dim);
    let query = choose(SINGLE, problem.head_dim, 0, device, vector)?;
    let together = choose(TOGETHER, width, 0, device, vector).ok();
    let parts = together.and_then(|tiles| parts(problem, device, &tiles));
    let key_value = match together.filter(|_| parts.is_some()) {
        Some(tiles) => tiles,
        None => choose(DOUBLE, width, 0, device, vector)?,
    };
    let plan = BackwardPlan {
        query,
        key_value,
        parts,
        bias: bias_sum(problem, device, &query),
    };
    check_iterations(backward_iterations(problem, &plan), device)?;
    Ok(plan)
}

/// Iterations of a unit's loops for a block: its columns by fours in the products that sum over them, its rows in those that
/// sum over these, and as much again where operands are copied to shared memory before.
fn block_iterations(tiles: &UnitTiles, columns: usize) -> usize {
    let products = columns.div_ceil(4) + tiles.columns() + 8;
    products * if tiles.direct { 1 } else { 2 }
}

/// Iterations of all loops of a unit, at most, in the kernel of the backward that runs the most of them.
fn backward_iterations(problem: &AttentionProblem, plan: &BackwardPlan) -> usize {
    let BackwardPlan {
        query,
        key_value,
        parts,
        bias,
    } = plan;
    let block = block_iterations;
    let both = problem.head_dim + problem.value_dim;
    let bias = match bias {
        None => 0,
        Some(BiasSum::Scores { parts }) => {
            let tiles = summed(problem, query.rows).div_ceil(*parts);
            tiles * block(query, both)
        }
        Some(BiasSum::Queries { parts }) => (*parts).max(summed(problem, 1).div_ceil(*parts)),
    };
    // One kernel for all gradients is launched as often as it takes.
    let separate = match parts {
        Some(_) => 0,
        None => {
            let query_blocks = problem.q_len.div_ceil(key_value.columns());
            let key_blocks = problem.kv_len.div_ceil(query.columns());
            let of_keys = problem.group() * query_blocks * block(key_value, both);
            of_keys.max(key_blocks * block(query, both))
        }
    };
    bias.max(separate)
}

/// What is summed for a number of the bias, of as many queries at a time as are `rows`.
fn summed(problem: &AttentionProblem, rows: usize) -> usize {
    let along = |size: usize, whole: usize| if size == 1 { whole } else { 1 };
    problem.bias.map_or(0, |([batch, heads, queries, _], _)| {
        along(batch, problem.batch)
            * along(heads, problem.q_heads)
            * along(queries, problem.q_len.div_ceil(rows))
    })
}

/// How the bias's gradient is summed, over scores by `tiles`.
fn bias_sum(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    tiles: &UnitTiles,
) -> Option<BiasSum> {
    let ([batch, heads, rows, columns], _) = problem.bias?;
    if columns == 1 {
        // The parts take as long to sum as each of them.
        let parts = summed(problem, 1).isqrt().max(1);
        return Some(BiasSum::Queries { parts });
    }
    let summed = summed(problem, tiles.rows);
    let cubes = batch * heads * rows.div_ceil(tiles.rows) * columns.div_ceil(tiles.columns());
    let wanted = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS)
        * BIAS_CUBES_PER_MULTIPROCESSOR
        / cubes.max(1);
    let needed = match device.processors {
        Some(_) => {
            let block = block_iterations(tiles, problem.head_dim + problem.value_dim);
            summed.div_ceil((SOFTWARE_ITERATIONS / block).max(1))
        }
        None => 1,
    };
    let parts = wanted.max(needed).clamp(1, summed.max(1));
    Some(BiasSum::Scores { parts })
}

/// Tiles of the forward, and how its keys are split.
fn forward_tiles(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    vector: usize,
) -> Result<ForwardPlan, Refusal> {
    let width = problem.value_dim;
    let rows = problem.q_len * problem.group();
    let decode = if rows <= DECODE_ROWS {
        choose(DECODE, width, rows, device, vector).ok()
    } else {
        None
    };
    let Some(tiles) = decode else {
        return Ok(ForwardPlan {
            tiles: choose(SINGLE, width, 0, device, vector)?,
            packed: false,
            splits: 1,
        });
    };
    let target =
        device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS) * CUBES_PER_MULTIPROCESSOR;
    let blocks = problem
        .visible_keys(problem.q_len)
        .div_ceil(tiles.columns())
        .max(1);
    let splits = (target / (problem.batch * problem.kv_heads).max(1)).clamp(1, blocks);
    Ok(ForwardPlan {
        tiles,
        packed: true,
        splits,
    })
}

/// Parts of the query's gradient where one kernel gives all three: as many as keep a software driver's
/// processors busy, if those are few, or fewer, so that the gradients fit one buffer; none where nothing fits.
fn parts(problem: &AttentionProblem, device: &DeviceProfile, tiles: &UnitTiles) -> Option<usize> {
    let heads = (problem.batch * problem.kv_heads).max(1);
    let parts = device.processors?.div_ceil(heads);
    let key_tiles = problem.kv_len.div_ceil(tiles.rows).max(1);
    if parts > MAX_PARTS {
        return None;
    }
    (1..=parts.min(key_tiles))
        .rev()
        .find(|parts| Packing::new(problem, *parts).fits(device))
}

/// Buffers of the kernel that binds the most.
fn bindings(problem: &AttentionProblem, pass: Pass) -> usize {
    let shared = usize::from(problem.mask.is_some())
        + usize::from(problem.bias.is_some())
        + usize::from(problem.kv_lengths || problem.segments);
    match pass {
        // query, key, value, output, logsumexp
        Pass::Forward => 5 + shared + usize::from(problem.sinks.is_some()),
        // query, key, value, output's gradient, rows, and two gradients
        Pass::Backward => 7 + shared,
    }
}

/// The first row of the table for `width` columns and at least `min_rows` rows that fits the device.
fn choose(
    table: &[Shape],
    width: usize,
    min_rows: usize,
    device: &DeviceProfile,
    vector: usize,
) -> Result<UnitTiles, Refusal> {
    table
        .iter()
        .filter(|shape| !shape.direct || device.processors.is_some())
        .filter(|shape| width <= shape.width && min_rows <= shape.rows)
        .map(|shape| tiles(shape, width, vector))
        .find(|tiles| {
            tiles.shared_memory() <= device.shared_memory && tiles.units <= device.units_per_cube
        })
        .ok_or(Refusal::Tiles {
            width,
            shared_memory: device.shared_memory,
            units: device.units_per_cube,
        })
}

/// Completes a row of the table: the division of the output's columns that loads and multiplies least,
/// and as many streamed rows as the first product's shared memory holds.
fn tiles(shape: &Shape, width: usize, vector: usize) -> UnitTiles {
    let Shape {
        units,
        rows,
        column_units,
        column_vectors,
        depth,
        direct,
        ..
    } = *shape;
    let vectors = width.div_ceil(4);
    let (output_units, output_vectors) = (0..)
        .map(|power| 1 << power)
        .skip_while(|output_units| output_units * rows < units)
        .take_while(|output_units| *output_units <= units)
        .map(|output_units| (output_units, vectors.div_ceil(output_units)))
        .min_by_key(|(output_units, output_vectors)| {
            let output_rows = rows * output_units / units;
            4 * output_rows * output_vectors + output_rows + 4 * output_vectors
        })
        .expect("rows are at least 1 and units a power of two");
    let mut tiles = UnitTiles {
        units,
        rows,
        column_units,
        column_vectors,
        depth,
        direct,
        output_units,
        output_vectors,
        staged_vectors: output_vectors,
        streamed_rows: 4,
        vector,
    };
    if direct {
        return tiles;
    }
    let room = tiles.transposed_vectors();
    while tiles.streamed_rows * tiles.staged_width() > room && tiles.staged_vectors > 1 {
        // The largest part that divides evenly.
        tiles.staged_vectors = (1..tiles.staged_vectors)
            .rev()
            .find(|staged| output_vectors.is_multiple_of(*staged))
            .unwrap_or(1);
    }
    while tiles.streamed_rows * 2 <= tiles.columns()
        && tiles.streamed_rows * 2 * tiles.staged_width() <= room
    {
        tiles.streamed_rows *= 2;
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(shared_memory: usize) -> DeviceProfile {
        DeviceProfile {
            name: "test".into(),
            dtypes: Vec::new(),
            shared_memory,
            units_per_cube: 256,
            bindings: 8,
            largest_buffer: 128 << 20,
            cube_count: 65535,
            processors: None,
            multiprocessors: None,
            features: vec![],
            left_out: vec![],
        }
    }

    /// Every width has a tile that fits 16 KB, and every tile divides as the kernels assume.
    #[test]
    fn every_width_fits_16_kb_and_divides_evenly() {
        for width in 1..=crate::MAX_HEAD_DIM {
            for table in [SINGLE, DOUBLE, DECODE, TOGETHER] {
                let small = choose(table, width, 0, &device(16 << 10), 4);
                let only_software = table.iter().all(|shape| shape.direct);
                assert!(small.is_ok() != only_software, "{width}: {small:?}");
                for shape in table.iter().filter(|shape| width <= shape.width) {
                    let tiles = tiles(shape, width, 4);
                    let context = format!("{width}: {tiles:?}");
                    assert!(
                        4 * tiles.output_units * tiles.output_vectors >= width,
                        "{context}"
                    );
                    assert_eq!(
                        tiles.rows_per_unit() * tiles.row_units(),
                        tiles.rows,
                        "{context}"
                    );
                    assert_eq!(
                        tiles.output_rows() * tiles.output_row_units(),
                        tiles.rows,
                        "{context}"
                    );
                    assert!(
                        tiles.rows_per_unit() > 0 && tiles.output_rows() > 0,
                        "{context}"
                    );
                    assert!(
                        !tiles.direct || tiles.rows_per_unit().is_multiple_of(4),
                        "{context}"
                    );
                    assert!(tiles.direct || tiles.column_vectors == 1, "{context}");
                    // The softmax takes a row a unit; all gradients together need none.
                    let row_a_unit = tiles.rows <= tiles.units && tiles.columns() <= tiles.units;
                    assert!(row_a_unit || only_software, "{context}");
                    assert!(
                        tiles.output_vectors.is_multiple_of(tiles.staged_vectors),
                        "{context}"
                    );
                    assert!(
                        tiles.columns().is_multiple_of(tiles.streamed_rows),
                        "{context}"
                    );
                }
            }
        }
    }
}
