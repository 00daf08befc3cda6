//! Tables of tiles: the numbers that are chosen by trial, the choice of a row for a device, and what follows from it.

use crate::device::DeviceProfile;
use crate::select::Refusal;
use crate::tile::tiles::{Products, UnitTiles};

/// The part of [`UnitTiles`] that is chosen; the rest follows from the output's width.
pub(crate) struct Shape {
    /// The widest output it is for.
    pub width: usize,
    units: usize,
    rows: usize,
    column_units: usize,
    column_vectors: usize,
    depth: usize,
    pub direct: bool,
}

/// A shape that copies the operands to shared memory.
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

/// A shape that reads the operands where they lie.
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

// Rows that read the operands where they lie are for software drivers: GFLOP/s on Mesa's llvmpipe, two
// threads, f32, 2 heads of length 256. Narrow outputs have small tiles there, since the driver takes longer
// to compile a kernel than to run it.
//
// TFLOP/s beside the other rows: one H200, f32, causal, length 4096, heads × head_dim = 2048, 2026-11-20, before
// the scores were summed by chunks; the others that were tried at that width in brackets. Rows for 32 KB
// and less were chosen on Mesa's llvmpipe, where 64 units with 4 × 4 of S each ran at twice the speed of
// 256 units with 2 × 4.

/// Output in registers once, or not at all: the forward, and the gradients of query and bias. The first row that is wide enough
/// and fits the device is taken.
pub(crate) const SINGLE: &[Shape] = &[
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

/// The first row of the table for `width` columns and at least `min_rows` rows that fits the device.
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

/// Completes a row of the table: the division of the output's columns that loads and multiplies least,
/// and as many streamed rows as the first product's shared memory holds.
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
