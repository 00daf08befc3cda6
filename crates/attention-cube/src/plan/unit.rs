//! The unit engine's plan: tiles from a table, by the width of the output and the device's shared memory.

use super::{DeviceProfile, Layouts, Pass, Refusal};
use crate::AttentionProblem;

/// The longest sequence that positions in i32 allow.
pub(crate) const MAX_LENGTH: usize = 1 << 29;

/// How a cube divides a tile among its units. `kernel/engine/unit.rs` opens with what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitTiles {
    /// Units of a cube.
    pub units: usize,
    /// Stationary rows.
    pub rows: usize,
    /// Units side by side in the first product; each owns 4 columns of the tile.
    pub column_units: usize,
    /// Columns of the operands multiplied at a time in the first product.
    pub depth: usize,
    /// Units side by side in the second product.
    pub output_units: usize,
    /// Vectors of 4 output columns of a unit in the second product.
    pub output_vectors: usize,
    /// Of those, how many have their operand in shared memory at a time.
    pub staged_vectors: usize,
    /// Streamed rows in shared memory at a time in the second product.
    pub streamed_rows: usize,
    /// Elements of a global load: 4, or 1 where strides or sizes do not allow it.
    pub vector: usize,
}

impl UnitTiles {
    /// Streamed rows of a block: the columns of S.
    pub const fn columns(&self) -> usize {
        4 * self.column_units
    }

    /// Units one above the other in the first product.
    pub const fn row_units(&self) -> usize {
        self.units / self.column_units
    }

    /// Rows of S that a unit owns: `unit_row + k · row_units`.
    pub const fn rows_per_unit(&self) -> usize {
        self.rows / self.row_units()
    }

    /// Units one above the other in the second product.
    pub const fn output_row_units(&self) -> usize {
        self.units / self.output_units
    }

    /// Rows of O that a unit owns.
    pub const fn output_rows(&self) -> usize {
        self.rows / self.output_row_units()
    }

    /// Vectors from one staged row of the first product to the next; odd, so that rows start in different banks.
    pub const fn depth_pitch(&self) -> usize {
        self.depth / 4 + 1
    }

    /// Vectors from one row of P to the next; odd likewise.
    pub const fn tile_pitch(&self) -> usize {
        self.column_units + 1
    }

    /// Vectors of a streamed row in shared memory at a time.
    pub const fn staged_width(&self) -> usize {
        self.output_units * self.staged_vectors
    }

    /// Vectors of shared memory that the first product's operands take.
    const fn transposed_vectors(&self) -> usize {
        (self.rows + self.columns()) * self.depth_pitch()
    }

    /// Vectors of shared memory that the operands of either product take.
    pub const fn stage_vectors(&self) -> usize {
        let streamed = self.streamed_rows * self.staged_width();
        if self.transposed_vectors() > streamed {
            self.transposed_vectors()
        } else {
            streamed
        }
    }

    /// Vectors of shared memory that P takes.
    pub const fn tile_vectors(&self) -> usize {
        self.rows * self.tile_pitch()
    }

    /// Floats of shared memory for partial row statistics.
    pub const fn partial_floats(&self) -> usize {
        self.rows * self.tile_pitch()
    }

    /// Floats of shared memory in which the bias's gradient adds the units' sums up.
    pub const fn sum_floats(&self) -> usize {
        self.units
            * if self.rows_per_unit() > 4 {
                self.rows_per_unit()
            } else {
                4
            }
    }

    /// Bytes of shared memory of the largest kernel.
    pub const fn shared_memory(&self) -> usize {
        let rows = 4 * (self.partial_floats() + 2 * self.rows + self.columns());
        let with_tile = 16 * (self.stage_vectors() + self.tile_vectors()) + rows;
        let with_sums = 16 * self.stage_vectors() + 4 * self.sum_floats();
        if with_tile > with_sums {
            with_tile
        } else {
            with_sums
        }
    }
}

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
}

/// What the unit engine launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnitPlan {
    /// For [`Pass::Forward`].
    Forward(ForwardPlan),
    /// For [`Pass::Backward`].
    Backward(BackwardPlan),
}

/// The part of [`UnitTiles`] that is chosen; the rest follows from the output's width.
struct Shape {
    /// The widest output it is for.
    width: usize,
    units: usize,
    rows: usize,
    column_units: usize,
    depth: usize,
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
        depth,
    }
}

// TFLOP/s beside the rows: one H200, f32, causal, length 4096, heads × head_dim = 2048, 2026-11-20, before
// the scores were summed by chunks; the others that were tried at that width in brackets. Rows for 32 KB
// and less were chosen on Mesa's llvmpipe, where 64 units with 4 × 4 of S each ran at twice the speed of
// 256 units with 2 × 4.

/// Output in registers once: the forward and the query's gradient. The first row that is wide enough
/// and fits the device is taken.
const SINGLE: &[Shape] = &[
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

/// Few rows: decoding, where reading the keys bounds everything.
const DECODE: &[Shape] = &[
    shape(1024, 256, 8, 32, 32),
    shape(1024, 256, 16, 16, 32),
    shape(512, 256, 32, 16, 32),
    // 16 KB
    shape(1024, 128, 8, 16, 16),
    shape(512, 128, 16, 8, 32),
];

/// Rows up to which the heads of a group share a tile.
const DECODE_ROWS: usize = 32;

/// Multiprocessors assumed where the runtime does not say.
const ASSUMED_MULTIPROCESSORS: usize = 16;

/// Cubes a multiprocessor that decoding splits its keys for.
const CUBES_PER_MULTIPROCESSOR: usize = 2;

/// Tiles for `problem`, or why there are none.
pub fn plan(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
    pass: Pass,
) -> Result<UnitPlan, Refusal> {
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
    let vector = if layouts.vectors
        && problem.head_dim.is_multiple_of(4)
        && problem.value_dim.is_multiple_of(4)
    {
        4
    } else {
        1
    };
    match pass {
        Pass::Forward => forward(problem, device, vector).map(UnitPlan::Forward),
        Pass::Backward => Ok(UnitPlan::Backward(BackwardPlan {
            query: choose(SINGLE, problem.head_dim, 0, device, vector)?,
            key_value: choose(
                DOUBLE,
                problem.head_dim.max(problem.value_dim),
                0,
                device,
                vector,
            )?,
        })),
    }
}

fn forward(
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
        depth,
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
        depth,
        output_units,
        output_vectors,
        staged_vectors: output_vectors,
        streamed_rows: 4,
        vector,
    };
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
            cube_count: 65535,
            multiprocessors: None,
            hopper: false,
        }
    }

    /// Every width has a tile that fits 16 KB, and every tile divides as the kernels assume.
    #[test]
    fn every_width_fits_16_kb_and_divides_evenly() {
        for width in 1..=crate::MAX_HEAD_DIM {
            for table in [SINGLE, DOUBLE, DECODE] {
                let small = choose(table, width, 0, &device(16 << 10), 4);
                assert!(small.is_ok(), "{width}: {small:?}");
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
                    assert!(tiles.rows <= tiles.units, "{context}");
                    assert!(tiles.columns() <= tiles.units, "{context}");
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
