//! The tiles of the split-N forward for few query rows over quantized keys and values.

use super::decode::first_that_fits;
use super::shape::{Shape, split_n_codes};
use super::split_n::MmaSplitNTiles;
use super::tiles::MmaForwardTiles;
use crate::types::quantized::CodeFormat;
use cube_kit::nvidia::Half;

/// The table of tiles of 8-bit codes: first the tiles of 16 rows, then of 32. The plan takes the first entry that has
/// enough rows, serves the problem's head sizes and fits the device's shared memory. Each head size has entries for
/// 227, 163 and 99 KB of shared memory. At more than 256 columns, registers cannot hold the output of 32 rows. Only the
/// first entry for head size 512 was measured, on an H200 with 8 query rows and int8 codes. The tiles of this entry
/// read K and V at 81 % of the rate of a memory copy. The other entries, and e4m3 codes, were not measured.
///
/// A block of codes has half the bytes of a bf16 block. The GEMMs of a block of codes take longer, because of the
/// conversion to bf16. The tiles in this table therefore have more warps than tiles for bf16. As many bytes are then in
/// flight as with bf16.
const WORDS: &[Shape] = &[
    split_n_codes([128, 128], [1, 1, 4], [32, 3, 2]),
    split_n_codes([128, 128], [1, 1, 4], [32, 2, 2]),
    split_n_codes([128, 128], [1, 1, 4], [16, 2, 2]),
    split_n_codes([256, 256], [1, 1, 8], [16, 3, 1]),
    split_n_codes([256, 256], [1, 1, 8], [16, 2, 1]),
    split_n_codes([256, 256], [1, 1, 4], [16, 2, 1]),
    split_n_codes([512, 512], [1, 2, 4], [16, 3, 1]),
    split_n_codes([512, 512], [1, 2, 4], [16, 2, 1]),
    split_n_codes([512, 512], [1, 2, 2], [16, 2, 1]),
    split_n_codes([576, 512], [1, 2, 4], [16, 2, 1]),
    split_n_codes([576, 512], [1, 2, 2], [16, 3, 1]),
    split_n_codes([576, 512], [1, 2, 1], [16, 3, 1]),
    split_n_codes([128, 128], [2, 1, 4], [16, 5, 2]),
    split_n_codes([128, 128], [2, 1, 4], [16, 4, 2]),
    split_n_codes([128, 128], [2, 1, 4], [16, 4, 1]),
    split_n_codes([256, 256], [2, 2, 4], [16, 5, 1]),
    split_n_codes([256, 256], [2, 2, 2], [16, 6, 1]),
    split_n_codes([256, 256], [2, 2, 2], [16, 4, 1]),
];

/// The number of rows in the largest tiles of this table. Some head sizes have no tiles of 32 rows. At these head
/// sizes, 32 rows take two tiles of 16 rows.
const MOST_ROWS: usize = 32;

/// Returns the tiles for `rows` query rows, or `None` if no tiles fit. `widths` are the head sizes of K and V, and
/// `format` is the format of their codes. `limits` are the largest number of bytes of shared memory per CTA, and the
/// largest number of threads per CTA.
///
/// If the rows need two tiles, the second tile reads K and V from the L2 cache. The alternative, a separate conversion
/// of K and V to bf16 before attention, would move five times as many bytes to and from memory.
pub(crate) fn decode_code_tiles(
    rows: usize,
    widths: [usize; 2],
    format: CodeFormat,
    limits: [usize; 2],
    page_len: Option<usize>,
) -> Option<MmaForwardTiles> {
    let of_rows = |rows| first_that_fits(WORDS, rows, widths, Half::Bf16, limits, page_len);
    let tiles = of_rows(rows).or_else(|| (rows <= MOST_ROWS).then(|| of_rows(MOST_ROWS / 2))?)?;
    Some(match tiles {
        MmaForwardTiles::SplitN(tiles) => MmaForwardTiles::SplitN(MmaSplitNTiles {
            codes: Some(format),
            ..tiles
        }),
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use super::super::decode::tests::{check, h200};
    use super::*;
    use crate::engine::tiling::NARROWEST;
    use crate::testing::{SHARED_MEMORY, problem};
    use crate::types::refusal::{Feature, Refusal};
    use crate::types::request::Layouts;
    use burn::tensor::DType;

    fn tiles(rows: usize, widths: [usize; 2], shared_memory: usize) -> Option<MmaForwardTiles> {
        decode_code_tiles(rows, widths, CodeFormat::Int8, [shared_memory, 1024], None)
    }

    /// Checks that the table has int8 tiles for every head size at each size of shared memory. Wide heads have only tiles of
    /// 16 rows, so 32 rows take two tiles. Each tile divides evenly among its warps.
    #[test]
    fn decode_code_tiles_every_width_fits_and_divides_evenly() {
        for head_dim in (NARROWEST..=576).step_by(4) {
            for value_dim in [head_dim.min(512), 8, 80, 260, 512] {
                for shared_memory in SHARED_MEMORY {
                    for rows in [1, 16, 17, 32] {
                        let found = tiles(rows, [head_dim, value_dim], shared_memory);
                        let context = format!("{rows} rows of {head_dim}, {value_dim}: {found:?}");
                        let Some(MmaForwardTiles::SplitN(tiles)) = found else {
                            panic!("{context}");
                        };
                        let expected = match head_dim.max(value_dim) > 256 {
                            true => 16,
                            false => rows.next_multiple_of(16),
                        };
                        assert_eq!(tiles.rows(), expected, "{context}");
                        assert!(tiles.shared_memory() <= shared_memory, "{context}");
                        assert_eq!(tiles.codes, Some(CodeFormat::Int8), "{context}");
                        check(&tiles);
                    }
                }
            }
        }
        for width in [64, 512] {
            assert_eq!(tiles(33, [width, width], SHARED_MEMORY[0]), None);
        }
    }

    /// Checks that the int8 tiles keep as many bytes in flight as the bf16 tiles. With 227, 163 and 99 KB of shared
    /// memory, a multiprocessor must have at least 60, 30 and 15 KB in flight. Copies are in flight to all of a warp's
    /// buffers except the buffer that the warp multiplies.
    #[test]
    fn decode_code_tiles_keep_enough_bytes_in_flight() {
        for (shared_memory, least) in SHARED_MEMORY
            .into_iter()
            .zip([60 << 10, 30 << 10, 15 << 10])
        {
            for width in [64, 128, 256, 512] {
                for rows in [16, 32] {
                    let found = tiles(rows, [width, width], shared_memory);
                    let Some(MmaForwardTiles::SplitN(tiles)) = found else {
                        panic!("{rows}, {width}: {found:?}");
                    };
                    let cubes =
                        MmaForwardTiles::SplitN(tiles).cubes_per_multiprocessor(shared_memory);
                    // Count only the bytes of int8 codes, because rows with few columns leave some bytes of each
                    // shared-memory buffer empty.
                    let ahead = (tiles.stages - 1) * tiles.keys * 2 * width / tiles.column_groups;
                    assert!(cubes * tiles.warps() * ahead >= least, "{tiles:?}");
                }
            }
        }
    }

    /// Checks when the plan reads codes of K and V without a copy. The GEMMs must be in bf16, and the number of bytes
    /// in a row must be a multiple of 16. The plan refuses rows of 72 bytes, and GEMMs in f16.
    #[test]
    fn forward_codes_of_keys_are_read_in_place_in_bf16_only() {
        use CodeFormat::{E4m3, Int8};
        for ([q_heads, kv_heads, q_len, kv_len], head_dim, format, served) in [
            ([32, 4, 1, 32_768], 512, Int8, true),
            ([32, 4, 2, 300], 256, E4m3, true),
            ([32, 4, 4, 300], 512, Int8, true),
            ([2, 2, 20, 300], 72, E4m3, false),
        ] {
            let sizes = [2, q_heads, kv_heads, q_len, kv_len, head_dim];
            let mut problem = problem(sizes);
            problem.quantized = Some(format);
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
