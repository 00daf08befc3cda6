//! The tiles of the forward for few query rows (decoding, and verification of draft tokens). One tile holds the queries
//! of several heads of a GQA group.

use super::occupancy::cubes_that_fit;
use super::shape::{Shape, split_d, split_m, split_n};
use super::tiles::MmaForwardTiles;
use cube_kit::nvidia::Half;

/// The table of tiles with at most 64 rows: first the tiles of 16 rows, then of 32, then of 64. The plan takes the
/// first entry that has enough rows, serves the problem's head sizes and fits the device's shared memory. Each head
/// size has entries for 227, 163 and 99 KB of shared memory. For more than 32 rows, some head sizes have no entry in
/// this table. The plan then uses the table `FORWARD` in `plan.rs`.
///
/// The speed depends on how many bytes each multiprocessor has in flight. To use the full memory bandwidth, the bytes
/// in flight must be at least the bandwidth per multiprocessor times the memory latency. With a latency of 800 ns, the
/// product is 30 KB for an H200, 12 KB for an A100, 5 KB for a gaming GPU.
const FEW_ROWS: &[Shape] = &[
    split_n([64, 64], [1, 1, 4], [32, 3, 2]),
    split_n([64, 64], [1, 1, 4], [16, 2, 2]),
    split_n([128, 128], [1, 1, 4], [16, 3, 2]),
    split_n([128, 128], [1, 1, 4], [16, 2, 2]),
    split_n([128, 128], [1, 1, 4], [16, 2, 1]),
    split_n([256, 256], [1, 1, 4], [16, 3, 1]),
    split_n([256, 256], [1, 1, 4], [16, 2, 1]),
    split_n([256, 256], [1, 1, 2], [16, 2, 1]),
    split_n([512, 512], [1, 2, 2], [16, 3, 1]),
    split_n([512, 512], [1, 2, 2], [16, 2, 1]),
    split_n([512, 512], [1, 2, 1], [16, 2, 1]),
    split_n([576, 512], [1, 2, 2], [16, 2, 1]),
    split_n([576, 512], [1, 2, 1], [16, 3, 1]),
    split_n([576, 512], [1, 2, 1], [16, 2, 1]),
    split_n([64, 64], [2, 1, 4], [32, 3, 2]),
    split_n([64, 64], [2, 1, 4], [16, 2, 2]),
    split_n([128, 128], [2, 1, 4], [16, 3, 2]),
    split_n([128, 128], [2, 1, 4], [16, 2, 2]),
    split_n([128, 128], [2, 1, 4], [16, 2, 1]),
    split_n([256, 256], [2, 2, 4], [16, 2, 1]),
    split_n([256, 256], [2, 2, 2], [16, 3, 1]),
    split_n([256, 256], [2, 2, 2], [16, 2, 1]),
    split_d([512, 512], [32, 128, 1], [128, 32, 1, 5, 1]),
    split_d([512, 512], [32, 128, 1], [128, 32, 1, 3, 1]),
    split_d([512, 512], [32, 128, 1], [64, 16, 1, 3, 1]),
    split_d([576, 512], [32, 128, 1], [128, 32, 1, 4, 1]),
    split_d([576, 512], [32, 128, 1], [128, 32, 1, 3, 1]),
    split_d([576, 512], [32, 128, 1], [64, 16, 1, 3, 1]),
    split_m([128, 128], [4, 1, 64]),
    split_d([256, 256], [64, 128, 2], [128, 64, 1, 5, 1]),
    split_d([256, 256], [64, 128, 2], [128, 64, 1, 3, 1]),
    split_d([256, 256], [64, 64, 2], [128, 32, 1, 3, 1]),
];

/// Returns the tiles for these head sizes and for `rows` query rows, or `None` if no tiles fit. `limits` are the
/// largest number of bytes of shared memory per CTA, and the largest number of threads per CTA.
pub(crate) fn few_rows_tiles(
    rows: usize,
    widths: [usize; 2],
    half: Half,
    limits: [usize; 2],
    page_len: Option<usize>,
) -> Option<MmaForwardTiles> {
    first_that_fits(FEW_ROWS, rows, widths, half, limits, page_len)
}

/// Returns the first tiles of `table` that have enough rows, serve the head sizes and fit the limits of a CTA. If K and
/// V lie in pages, the function prefers tiles whose kernel reads the pages without a copy.
pub(super) fn first_that_fits(
    table: &[Shape],
    rows: usize,
    [head_dim, value_dim]: [usize; 2],
    half: Half,
    [shared_memory, units]: [usize; 2],
    page_len: Option<usize>,
) -> Option<MmaForwardTiles> {
    let mut fitting = table
        .iter()
        .filter(|shape| shape.is_for(head_dim, value_dim))
        .map(|shape| (shape, shape.tiles(head_dim, value_dim, half)))
        .filter(|(shape, tiles)| {
            rows <= tiles.rows()
                && tiles.units() <= units
                && shape.cubes() <= cubes_that_fit(tiles.shared_memory(), shared_memory)
        })
        .map(|(_, tiles)| tiles);
    let first = fitting.next()?;
    match page_len {
        Some(page_len) if !first.reads_pages(page_len) => {
            let reading = fitting.find(|tiles| tiles.reads_pages(page_len));
            Some(reading.unwrap_or(first))
        }
        _ => Some(first),
    }
}

/// True if the kernel of these tiles sums `q·k` in the order in which the backward sums it. The orders differ if two
/// warps divide the columns of Q and K.
pub(super) const fn sums_as_backward(tiles: &MmaForwardTiles) -> bool {
    match tiles {
        MmaForwardTiles::SplitN(tiles) => tiles.column_groups == 1,
        MmaForwardTiles::SplitM(_) | MmaForwardTiles::SplitD(_) => true,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::engine::tensor_core::mma::plan::split_n::MmaSplitNTiles;
    use crate::engine::tensor_core::mma::plan::tests::check_division;
    use crate::engine::tiling::NARROWEST;
    use crate::testing::{SHARED_MEMORY, card, problem};
    use crate::types::device::DeviceProfile;
    use crate::types::refusal::Feature;
    use crate::types::request::Layouts;
    use burn::tensor::DType;

    fn tiles(
        rows: usize,
        [head_dim, value_dim]: [usize; 2],
        shared_memory: usize,
    ) -> Option<MmaForwardTiles> {
        few_rows_tiles(
            rows,
            [head_dim, value_dim],
            Half::Bf16,
            [shared_memory, 1024],
            None,
        )
    }

    /// Checks that the table for few rows has tiles for every head size at each size of shared memory. The tiles must
    /// not have more rows than the number of query rows requires. The warps must divide split-N and split-D tiles
    /// evenly.
    #[test]
    fn few_rows_tiles_every_width_has_the_fewest_rows() {
        for head_dim in NARROWEST..=576 {
            for value_dim in [head_dim.min(512), 8, 80, 257, 512] {
                for shared_memory in SHARED_MEMORY {
                    for rows in [1, 16, 17, 32] {
                        let found = tiles(rows, [head_dim, value_dim], shared_memory);
                        let found = found.unwrap_or_else(|| {
                            panic!("no tiles for {rows} rows of {head_dim} and {value_dim} columns in {shared_memory} bytes")
                        });
                        assert_eq!(found.rows(), rows.next_multiple_of(16));
                        assert!(found.shared_memory() <= shared_memory, "{found:?}");
                        match found {
                            MmaForwardTiles::SplitN(tiles) => check(&tiles),
                            MmaForwardTiles::SplitD(tiles) => check_division(&tiles),
                            MmaForwardTiles::SplitM(_) => (),
                        }
                    }
                }
            }
        }
    }

    pub(in super::super) fn check(tiles: &MmaSplitNTiles) {
        let context = format!("{tiles:?}");
        assert!(matches!(tiles.fragments, 1 | 2), "{context}");
        assert!(matches!(tiles.column_groups, 1 | 2), "{context}");
        // The mask word of a row has 32 bits, one per key of a block, so a block has at most 32 keys.
        assert!(matches!(tiles.keys, 16 | 32), "{context}");
        assert!(tiles.stages >= 2, "{context}");
        // If a key group has two warps, it has a named barrier of its own. These barriers have the numbers from 1 on.
        // The hardware has the barriers 0 to 15, so at most 15 key groups can have one.
        assert!(tiles.key_groups < 16, "{context}");
        // At the end, the key groups (warps that process different keys) exchange their outputs through shared memory.
        // Each warp's output overwrites the warp's buffers for K and V, so the output must fit these buffers.
        assert!(tiles.output_bytes() <= tiles.warp_bytes(), "{context}");
        for place in [tiles.stages_at(), tiles.warp_bytes(), tiles.key_bytes()] {
            assert_eq!(place % 128, 0, "{context}");
        }
        for place in [tiles.exchange_at(), tiles.exchange_bytes()] {
            assert_eq!(place % 16, 0, "{context}");
        }
        assert!(
            tiles.key_columns() * tiles.column_groups >= tiles.head_dim
                && tiles.value_columns() * tiles.column_groups >= tiles.value_dim,
            "{context}"
        );
        assert!(
            tiles.part_steps() * tiles.key_groups >= tiles.warp().steps(),
            "{context}"
        );
        assert!(
            tiles.vectors().iter().all(|&registers| registers <= 128),
            "{context}"
        );
    }

    /// Returns the device profile of an H200, with the features that the engine requires for bf16.
    pub(in super::super) fn h200() -> DeviceProfile {
        DeviceProfile {
            dtypes: vec![DType::BF16],
            multiprocessors: Some(132),
            features: vec![
                Feature::CopyAsync,
                Feature::Mma(DType::BF16),
                Feature::LoadMatrix(DType::BF16),
            ],
            ..card(SHARED_MEMORY[0])
        }
    }

    /// Checks the rows of a tile, the query heads per tile, and the number of key splits. The rows of a GQA group get
    /// the smallest tile that holds all of them. The keys are split if the tiles alone do not fill the GPU. For
    /// prompts, the plan uses the table `FORWARD`.
    #[test]
    fn forward_few_rows_takes_the_smallest_tile() {
        for ([q_heads, kv_heads, q_len, kv_len], head_dim, rows, heads, splits) in [
            ([32, 4, 1, 32_768], 512, 16, 8, 16),
            ([32, 16, 1, 32_768], 256, 16, 2, 4),
            ([32, 32, 1, 32_768], 128, 16, 1, 4),
            ([8, 1, 2, 32_768], 256, 16, 8, 64),
            ([8, 1, 4, 32_768], 256, 32, 8, 64),
            ([8, 1, 8, 32_768], 256, 64, 8, 64),
            ([8, 1, 8, 32_768], 512, 64, 8, 66),
            ([8, 8, 16, 100], 64, 16, 1, 1),
            ([8, 1, 9, 32_768], 128, 128, 8, 132),
            ([8, 8, 4096, 4096], 128, 128, 1, 1),
        ] {
            let sizes = [2, q_heads, kv_heads, q_len, kv_len, head_dim];
            let problem = problem(sizes);
            let layouts = Layouts::contiguous(&problem);
            let plan = super::super::forward(&problem, &h200(), layouts, false);
            let plan = plan.unwrap_or_else(|refusal| panic!("{sizes:?}: {refusal}"));
            let found = (plan.tiles.rows(), plan.heads, plan.splits);
            assert_eq!(found, (rows, heads, splits), "{sizes:?}");
        }
    }

    /// Checks the table's entries for more than 32 rows. At head sizes 64, 128 and 256, the table has tiles of 64 rows
    /// for 33 rows, and no tiles for 65 rows. At head size 512, the table has no tiles for 33 rows, because the table
    /// `FORWARD` already has tiles of 64 rows.
    #[test]
    fn few_rows_tiles_33_rows_get_64_rows() {
        for width in [64, 128, 256] {
            for shared_memory in SHARED_MEMORY {
                let found = tiles(33, [width, width], shared_memory);
                assert_eq!(found.map(|tiles| tiles.rows()), Some(64), "{width}");
                if let Some(MmaForwardTiles::SplitD(tiles)) = found {
                    check_division(&tiles);
                }
                assert_eq!(tiles(65, [width, width], shared_memory), None, "{width}");
            }
        }
        assert_eq!(tiles(33, [512, 512], SHARED_MEMORY[0]), None);
    }

    /// Checks that enough bytes are in flight while a warp multiplies a block. With 227, 163 and 99 KB of shared
    /// memory, a multiprocessor must have at least 60, 30 and 15 KB in flight. Copies are in flight to all of a warp's
    /// buffers except the buffer that the warp multiplies.
    #[test]
    fn few_rows_tiles_16_rows_keep_enough_bytes_in_flight() {
        for (shared_memory, least) in SHARED_MEMORY
            .into_iter()
            .zip([60 << 10, 30 << 10, 15 << 10])
        {
            for width in [64, 128, 256, 512] {
                let found = tiles(16, [width, width], shared_memory);
                let Some(MmaForwardTiles::SplitN(tiles)) = found else {
                    panic!("{width}: {found:?}");
                };
                let cubes = MmaForwardTiles::SplitN(tiles).cubes_per_multiprocessor(shared_memory);
                let ahead = (tiles.stages - 1) * tiles.stage_bytes();
                assert!(cubes * tiles.warps() * ahead >= least, "{tiles:?}");
            }
        }
    }
}
