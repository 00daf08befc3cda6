//! The tile tables that only the unit engine uses. `tile_ops/table.rs` explains the order of the tiles, and the rates
//! (TFLOP/s or GFLOP/s) in the comments.

use crate::tile_ops::table::{Shape, direct, shape};

/// The tiles of the kernel for the gradients of keys and values. The number beside a tile is the TFLOP/s of the whole
/// backward. Parentheses hold the TFLOP/s with the tiles that were rejected.
pub(super) const DOUBLE: &[Shape] = &[
    direct(32, 64, 32, 8, 1),
    direct(512, 64, 64, 8, 2), // D512 full 10.7 GFLOP/s (staged: 1.6)
    direct(1024, 64, 32, 8, 2),
    // The tiles above are for software drivers, and the tiles below for GPUs.
    shape(64, 256, 64, 16, 32),  // 16.1 (13.9–16.2)
    shape(128, 128, 64, 16, 32), // 15.0 (12.9–14.7)
    shape(256, 512, 64, 32, 32), // 12.8 (9.7–11.8)
    // The next tiles fit 48 KB of shared memory.
    shape(256, 256, 64, 16, 32), // 11.8
    shape(512, 512, 32, 32, 32), // 9.1 (6.9–9.0)
    shape(1024, 512, 16, 32, 32),
    // The next tiles fit 32 KB of shared memory.
    shape(128, 64, 32, 8, 32),
    shape(256, 128, 32, 16, 32), // 11.3
    shape(512, 256, 32, 16, 32), // 8.3
    shape(1024, 256, 8, 32, 32),
    // The next tiles fit 16 KB of shared memory.
    shape(256, 64, 32, 8, 32),
    shape(1024, 128, 8, 16, 16),
];

/// The square tiles of the kernel that computes all gradients, on software drivers. No output stays in registers.
///
/// For wide heads, each unit computes 16 × 16 elements of S. At head size 512 without a mask, the kernel takes 88 ms of CPU
/// time. With 8 × 8 elements per unit, the kernel takes 112 ms. Separate kernels for the gradients take 105 ms.
pub(super) const TOGETHER: &[Shape] = &[
    direct(32, 64, 32, 8, 1),
    direct(128, 64, 64, 8, 2),
    direct(1024, 16, 64, 4, 4),
];

/// The tiles of the forward for few query rows, as in decoding. The time to read the keys from memory limits the
/// kernel's speed.
pub(super) const DECODE: &[Shape] = &[
    // With the next tiles, the kernel loads operands directly from global memory, as the backward does. Forward and
    // backward then compute bitwise equal scores. If a large score differed in its last bit, the backward would compute
    // a wrong probability.
    direct(1024, 64, 16, 16, 1),
    direct(1024, 64, 32, 8, 1),
    // The tiles above are for software drivers, and the tiles below for GPUs.
    shape(1024, 256, 8, 32, 32),
    shape(1024, 256, 16, 16, 32),
    shape(512, 256, 32, 16, 32),
    // The next tiles fit 16 KB of shared memory.
    shape(1024, 128, 8, 16, 16),
    shape(512, 128, 16, 8, 32),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tile_ops::table::{SINGLE, choose, tiles};
    use crate::types::device::{DeviceProfile, FragmentSupport};

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
            fragments: FragmentSupport::default(),
            disabled_engines: vec![],
            not_built: vec![],
        }
    }

    /// Checks that every width has a tile that fits 16 KB of shared memory, and that every tile divides evenly.
    #[test]
    fn every_width_fits_16_kb_and_divides_evenly() {
        for width in 1..=crate::problem::MAX_HEAD_DIM {
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
                        !tiles.is_direct() || tiles.rows_per_unit().is_multiple_of(4),
                        "{context}"
                    );
                    assert!(tiles.is_direct() || tiles.column_vectors == 1, "{context}");
                    // The softmax gives each row of the tile to one unit, so there must be at least as many units as
                    // rows. The kernel that computes all gradients has no softmax, so the tiles of this kernel may have
                    // more rows.
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
