//! The tiles of the forward for few rows: queries of a group's heads that together fit a tile smaller than those of prompts.

use super::shape::{Shape, split_d, split_m, split_n};
use super::{ForwardTiles, cubes_that_fit};
use cube_kit::hopper::Half;

/// The first that has the rows, is wide enough and fits. For 16 rows, then 32, then 64, and of each width for 227, 163 and 99 KB; wider
/// operands of 64 rows have the tiles that prompts have.
///
/// What counts is how much is on its way to a multiprocessor. By the memory's rate and 800 ns an H200 needs 30 KB, an A100 12, cards for
/// games 5, and more where something waits.
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

/// The tiles for so many rows and operands of this width that fit so many bytes of shared memory and units of a cube, if there are any.
pub(crate) fn few_rows_tiles(
    rows: usize,
    head_dim: usize,
    value_dim: usize,
    half: Half,
    [shared_memory, units]: [usize; 2],
) -> Option<ForwardTiles> {
    first_that_fits(
        FEW_ROWS,
        rows,
        [head_dim, value_dim],
        half,
        [shared_memory, units],
    )
}

/// The first tiles of a table that have the rows, are wide enough and fit.
pub(super) fn first_that_fits(
    table: &[Shape],
    rows: usize,
    [head_dim, value_dim]: [usize; 2],
    half: Half,
    [shared_memory, units]: [usize; 2],
) -> Option<ForwardTiles> {
    table
        .iter()
        .filter(|shape| shape.is_for(head_dim, value_dim))
        .map(|shape| (shape, shape.tiles(head_dim, value_dim, half)))
        .find(|(shape, tiles)| {
            rows <= tiles.rows()
                && tiles.units() <= units
                && shape.cubes() <= cubes_that_fit(tiles.shared_memory(), shared_memory)
        })
        .map(|(_, tiles)| tiles)
}

/// Whether dots are added up in the order in which the backward adds them up. Warps that divide the columns add up two halves.
pub(super) const fn sums_as_backward(tiles: &ForwardTiles) -> bool {
    match tiles {
        ForwardTiles::SplitN(tiles) => tiles.column_groups == 1,
        ForwardTiles::SplitM(_) | ForwardTiles::SplitD(_) => true,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::device::{DeviceProfile, Feature};
    use crate::division::NARROWEST;
    use crate::engine::mma::plan::split_n::SplitNTiles;
    use crate::engine::mma::plan::tests::check_division;
    use crate::select::Layouts;
    use crate::testing::{SHARED_MEMORY, card, problem};
    use burn::tensor::DType;

    fn tiles(
        rows: usize,
        [head_dim, value_dim]: [usize; 2],
        shared_memory: usize,
    ) -> Option<ForwardTiles> {
        few_rows_tiles(rows, head_dim, value_dim, Half::Bf16, [shared_memory, 1024])
    }

    /// Every width has a small tile on every card, and every tile whose warps divide keys or columns divides as its kernel assumes.
    #[test]
    fn every_width_has_a_small_tile() {
        for head_dim in NARROWEST..=576 {
            for value_dim in [head_dim.min(512), 8, 80, 257, 512] {
                for shared_memory in SHARED_MEMORY {
                    for rows in [1, 16, 17, 32] {
                        let found = tiles(rows, [head_dim, value_dim], shared_memory);
                        let found = found.unwrap_or_else(|| {
                            panic!("{rows} rows of {head_dim}, {value_dim}: {shared_memory}")
                        });
                        assert_eq!(found.rows(), rows.next_multiple_of(16));
                        assert!(found.shared_memory() <= shared_memory, "{found:?}");
                        match found {
                            ForwardTiles::SplitN(tiles) => check(&tiles),
                            ForwardTiles::SplitD(tiles) => check_division(&tiles),
                            ForwardTiles::SplitM(_) => (),
                        }
                    }
                }
            }
        }
    }

    pub(in super::super) fn check(tiles: &SplitNTiles) {
        let context = format!("{tiles:?}");
        assert!(matches!(tiles.fragments, 1 | 2), "{context}");
        assert!(matches!(tiles.column_groups, 1 | 2), "{context}");
        // A word of the mask is of one block.
        assert!(matches!(tiles.keys, 16 | 32), "{context}");
        assert!(tiles.stages >= 2, "{context}");
        // Barriers of their own for groups of two warps.
        assert!(tiles.key_groups < 16, "{context}");
        // The output is exchanged where the stages were, four registers of all lanes at a time.
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

    /// An H200, which serves the engine's problems.
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

    /// Heads of a group share the smallest tile that has them all, and keys are split where tiles do not fill the card; prompts
    /// have the tiles of prompts.
    #[test]
    fn the_plan_has_the_smallest_tile() {
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

    /// Tiles of 64 rows where those of prompts have more, and none for more rows.
    #[test]
    fn more_rows_have_larger_tiles() {
        for width in [64, 128, 256] {
            for shared_memory in SHARED_MEMORY {
                let found = tiles(33, [width, width], shared_memory);
                assert_eq!(found.map(|tiles| tiles.rows()), Some(64), "{width}");
                if let Some(ForwardTiles::SplitD(tiles)) = found {
                    check_division(&tiles);
                }
                assert_eq!(tiles(65, [width, width], shared_memory), None, "{width}");
            }
        }
        assert_eq!(tiles(33, [512, 512], SHARED_MEMORY[0]), None);
    }

    /// On every card there are bytes enough on their way while a block is multiplied: the blocks of a warp but one.
    #[test]
    fn enough_is_on_its_way() {
        for (shared_memory, least) in SHARED_MEMORY
            .into_iter()
            .zip([60 << 10, 30 << 10, 15 << 10])
        {
            for width in [64, 128, 256, 512] {
                let found = tiles(16, [width, width], shared_memory);
                let Some(ForwardTiles::SplitN(tiles)) = found else {
                    panic!("{width}: {found:?}");
                };
                let cubes = ForwardTiles::SplitN(tiles).cubes_per_multiprocessor(shared_memory);
                let ahead = (tiles.stages - 1) * tiles.stage_bytes();
                assert!(cubes * tiles.warps() * ahead >= least, "{tiles:?}");
            }
        }
    }
}
