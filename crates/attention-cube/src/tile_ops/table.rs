//! Tables of tile shapes, and the choice of a tile shape for a device. The shapes in the tables were selected by
//! benchmarks.

use crate::tile_ops::tiles::{Products, UnitTiles};
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;

/// The tile sizes that a table entry states. All other sizes of [`UnitTiles`] follow from these sizes and from the output's
/// width.
pub(crate) struct Shape {
    /// The widest output, in columns, for which a kernel may use the tile shape.
    pub width: usize,
    units: usize,
    rows: usize,
    column_units: usize,
    column_vectors: usize,
    depth: usize,
    pub direct: bool,
}

/// Returns a tile shape for kernels that copy the operands to shared memory.
pub(crate) const fn shape(
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

/// Returns a tile shape for kernels that read the operands from global memory.
pub(crate) const fn direct(
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

// Tile shapes from `direct` are for software drivers, and their kernels read the operands from global memory. The
// comments on these shapes give GFLOP/s on Mesa's llvmpipe with two threads, f32, 2 heads and sequence length 256.
// Narrow outputs have small tiles on llvmpipe, because compiling a kernel takes longer than running it there, and small
// tiles compile faster.
//
// All other comments give TFLOP/s on one H200: f32, causal, length 4096, heads × head_dim = 2048. The rates were
// measured on 2026-11-20, before kernels summed each dot product in chunks. Parentheses give the rates of rejected
// shapes. Shapes for 32 KB of shared memory and less were chosen on llvmpipe. There, 64 units with 4 × 4 elements of S
// each ran at twice the speed of 256 units with 2 × 4 elements.

/// The tile shapes for kernels with at most one accumulator O in registers: the forward pass, and the gradients of
/// query and bias. [`choose`] takes the first shape that is wide enough and fits the device.
pub(crate) const SINGLE: &[Shape] = &[
    direct(32, 64, 32, 8, 1),
    direct(512, 64, 64, 8, 2), // D512 full 11.4 GFLOP/s (staged, 4 × 4 of S per unit: 3.2)
    direct(1024, 64, 32, 8, 2),
    // The next tile shapes are for GPUs.
    shape(128, 256, 64, 16, 32), // D64 24.9 (20.1–25.5), D128 24.9 (17.2–24.6)
    shape(256, 256, 64, 16, 16), // 23.0 (10.8–19.5; depth 32: 18.0)
    shape(512, 512, 64, 32, 32), // 19.8 (9.1–18.1)
    // The next tile shapes fit 48 KB of shared memory per cube.
    shape(512, 256, 32, 32, 32), // 16.8
    shape(1024, 512, 32, 32, 32),
    // The next tile shapes fit 32 KB of shared memory per cube.
    shape(256, 64, 32, 8, 32),
    shape(512, 256, 32, 16, 32), // 10.5
    shape(1024, 256, 16, 16, 32),
    // The next tile shapes fit 16 KB of shared memory per cube.
    shape(512, 64, 32, 8, 32),
    shape(1024, 128, 8, 16, 16),
];

/// Returns the first tile shape of `table` that allows `width` output columns, has at least `min_rows` rows, and fits the
/// device.
pub(crate) fn choose(
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

/// Computes all tile sizes that follow from a shape. The function divides the columns of the output among the units so
/// that a unit needs the fewest loads and multiplications. One chunk of streamed rows must fit into the shared memory
/// that the operands of the first product take.
pub(crate) fn tiles(shape: &Shape, width: usize, vector: usize) -> UnitTiles {
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
        .map(|scale_log2| 1 << scale_log2)
        .skip_while(|output_units| output_units * rows < units)
        .take_while(|output_units| *output_units <= units)
        .map(|output_units| (output_units, vectors.div_ceil(output_units)))
        .min_by_key(|(output_units, output_vectors)| {
            let output_rows = rows * output_units / units;
            4 * output_rows * output_vectors + output_rows + 4 * output_vectors
        })
        .expect("a shape has at least 1 row and a power of two of units");
    let mut tiles = UnitTiles {
        units,
        rows,
        column_units,
        column_vectors,
        depth,
        products: match direct {
            true => Products::Direct,
            false => Products::Staged,
        },
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
        // Lower the number of vectors per chunk of B to the next smaller divisor of `output_vectors`, so that all
        // chunks have the same width.
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
