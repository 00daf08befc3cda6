//! The unit engine's own tables of tiles. Which rows are for what, and what the numbers beside them are, is said where the table is
//! that it shares with the passes.

use crate::tile::table::{Shape, direct, shape};

/// Output in registers twice: the gradients of keys and values. TFLOP/s are of the whole backward.
pub(super) const DOUBLE: &[Shape] = &[
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
pub(super) const TOGETHER: &[Shape] = &[
    direct(32, 64, 32, 8, 1),
    direct(128, 64, 64, 8, 2),
    direct(1024, 16, 64, 4, 4),
];

/// Few rows: decoding, where reading the keys bounds everything.
pub(super) const DECODE: &[Shape] = &[
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{DeviceProfile, FragmentSupport};
    use crate::tile::table::{SINGLE, choose, tiles};

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
            left_out: vec![],
            not_built: vec![],
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
                        !tiles.is_direct() || tiles.rows_per_unit().is_multiple_of(4),
                        "{context}"
                    );
                    assert!(tiles.is_direct() || tiles.column_vectors == 1, "{context}");
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
