//! The tiles of the forward for few rows of keys and values in int8, in the kernel whose warps divide the keys.

use super::ForwardTiles;
use super::few_rows::first_that_fits;
use super::shape::{Shape, split_n_of_words};
use cube_kit::hopper::Half;

/// The first that has the rows, is wide enough and fits. For 16 rows, then 32, and of each width for 227, 163 and 99 KB. Of more than 256 columns
/// 32 rows have no registers for their output. At D512 with 8 rows an H200 reads by the first of them at 81 % of its copy rate; others are not measured.
///
/// A block has half of the bytes that it has in bf16, and a multiplication of codes takes longer: so there are more warps, and as many bytes
/// on their way.
const WORDS: &[Shape] = &[
    split_n_of_words([128, 128], [1, 1, 4], [32, 3, 2]),
    split_n_of_words([128, 128], [1, 1, 4], [32, 2, 2]),
    split_n_of_words([128, 128], [1, 1, 4], [16, 2, 2]),
    split_n_of_words([256, 256], [1, 1, 8], [16, 3, 1]),
    split_n_of_words([256, 256], [1, 1, 8], [16, 2, 1]),
    split_n_of_words([256, 256], [1, 1, 4], [16, 2, 1]),
    split_n_of_words([512, 512], [1, 2, 4], [16, 3, 1]),
    split_n_of_words([512, 512], [1, 2, 4], [16, 2, 1]),
    split_n_of_words([512, 512], [1, 2, 2], [16, 2, 1]),
    split_n_of_words([576, 512], [1, 2, 4], [16, 2, 1]),
    split_n_of_words([576, 512], [1, 2, 2], [16, 3, 1]),
    split_n_of_words([576, 512], [1, 2, 1], [16, 3, 1]),
    split_n_of_words([128, 128], [2, 1, 4], [16, 5, 2]),
    split_n_of_words([128, 128], [2, 1, 4], [16, 4, 2]),
    split_n_of_words([128, 128], [2, 1, 4], [16, 4, 1]),
    split_n_of_words([256, 256], [2, 2, 4], [16, 5, 1]),
    split_n_of_words([256, 256], [2, 2, 2], [16, 6, 1]),
    split_n_of_words([256, 256], [2, 2, 2], [16, 4, 1]),
];

/// The rows of the largest tiles. Widths without such tiles use two tiles of half the rows.
const MOST_ROWS: usize = 32;

/// The tiles for `rows` rows over int8 of these widths that fit the limits of shared memory and units of a cube, if there are any.
///
/// The second of two tiles finds the keys in the L2 cache. A copy of all keys in bf16 would move five times the bytes of one pass.
pub(crate) fn word_tiles(
    rows: usize,
    widths: [usize; 2],
    limits: [usize; 2],
) -> Option<ForwardTiles> {
    let of_rows = |rows| first_that_fits(WORDS, rows, widths, Half::Bf16, limits);
    of_rows(rows).or_else(|| (rows <= MOST_ROWS).then(|| of_rows(MOST_ROWS / 2))?)
}

#[cfg(test)]
mod tests {
    use super::super::few_rows::tests::{check, h200};
    use super::*;
    use crate::device::Feature;
    use crate::division::NARROWEST;
    use crate::select::{Layouts, Refusal};
    use crate::testing::{SHARED_MEMORY, problem};
    use burn::tensor::DType;

    fn tiles(rows: usize, widths: [usize; 2], shared_memory: usize) -> Option<ForwardTiles> {
        word_tiles(rows, widths, [shared_memory, 1024])
    }

    /// Every width has tiles of 16 rows on every card, those up to 256 of 32 rows, too, wider ones two of 16, and all divide as the kernel assumes.
    #[test]
    fn every_width_has_tiles() {
        for head_dim in (NARROWEST..=576).step_by(4) {
            for value_dim in [head_dim.min(512), 8, 80, 260, 512] {
                for shared_memory in SHARED_MEMORY {
                    for rows in [1, 16, 17, 32] {
                        let found = tiles(rows, [head_dim, value_dim], shared_memory);
                        let context = format!("{rows} rows of {head_dim}, {value_dim}: {found:?}");
                        let Some(ForwardTiles::SplitN(tiles)) = found else {
                            panic!("{context}");
                        };
                        let expected = match head_dim.max(value_dim) > 256 {
                            true => 16,
                            false => rows.next_multiple_of(16),
                        };
                        assert_eq!(tiles.rows(), expected, "{context}");
                        assert!(tiles.shared_memory() <= shared_memory, "{context}");
                        assert!(tiles.reads_words, "{context}");
                        check(&tiles);
                    }
                }
            }
        }
        for width in [64, 512] {
            assert_eq!(tiles(33, [width, width], SHARED_MEMORY[0]), None);
        }
    }

    /// On every card there are as many bytes on their way as in bf16: the blocks of a warp but one.
    #[test]
    fn enough_is_on_its_way() {
        for (shared_memory, least) in SHARED_MEMORY
            .into_iter()
            .zip([60 << 10, 30 << 10, 15 << 10])
        {
            for width in [64, 128, 256, 512] {
                for rows in [16, 32] {
                    let found = tiles(rows, [width, width], shared_memory);
                    let Some(ForwardTiles::SplitN(tiles)) = found else {
                        panic!("{rows}, {width}: {found:?}");
                    };
                    let cubes = ForwardTiles::SplitN(tiles).cubes_per_multiprocessor(shared_memory);
                    // Codes alone: narrow rows leave a part of a stage empty.
                    let ahead = (tiles.stages - 1) * tiles.keys * 2 * width / tiles.column_groups;
                    assert!(cubes * tiles.warps() * ahead >= least, "{tiles:?}");
                }
            }
        }
    }

    /// Words are read where bf16 multiplies them and their rows are of whole pieces.
    #[test]
    fn the_plan_reads_words_in_bf16() {
        for ([q_heads, kv_heads, q_len, kv_len], head_dim, served) in [
            ([32, 4, 1, 32_768], 512, true),
            ([32, 4, 2, 300], 256, true),
            ([32, 4, 4, 300], 512, true),
            ([2, 2, 20, 300], 72, false),
        ] {
            let sizes = [2, q_heads, kv_heads, q_len, kv_len, head_dim];
            let mut problem = problem(sizes);
            problem.quantized = true;
            let layouts = Layouts::contiguous(&problem);
            let plan = super::super::forward(&problem, &h200(), layouts, false);
            match plan {
                Ok(plan) => {
                    assert!(served, "{sizes:?}: {plan:?}");
                    assert!(!plan.copies.key && !plan.copies.value, "{plan:?}");
                }
                Err(refusal) => {
                    assert!(!served, "{sizes:?}: {refusal}");
                    assert!(matches!(refusal, Refusal::Quantized(_)), "{refusal}");
                }
            }
            problem.dtype = DType::F16;
            let mut device = h200();
            device.dtypes.push(DType::F16);
            let features = [Feature::Mma(DType::F16), Feature::LoadMatrix(DType::F16)];
            device.features.extend(features);
            let refusal = super::super::forward(&problem, &device, layouts, false);
            assert!(matches!(refusal, Err(Refusal::Quantized(_))), "{refusal:?}");
        }
    }
}
