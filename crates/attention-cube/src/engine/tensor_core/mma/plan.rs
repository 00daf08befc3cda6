//! Plans the kernels of the `mma` engine. Tables give the tiles, by head size and by the shared memory of the device.

mod bias_gradient;
mod decode;
mod decode_codes;
mod gradient;
mod occupancy;
mod requirements;
pub mod ring;
mod shape;
pub mod split_d;
pub mod split_m;
pub mod split_n;
mod tiles;
pub mod warp;

pub use self::bias_gradient::BiasGradientTiles;
pub(crate) use self::bias_gradient::bias_gradient_tiles;
pub(crate) use self::decode::few_rows_tiles;
use self::decode::sums_as_backward;
pub(crate) use self::decode_codes::decode_code_tiles;
pub(super) use self::gradient::backward;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use self::gradient::gradient_tiles;
pub use self::gradient::{
    MmaBackwardPlan, MmaGradientSplitDTiles, MmaGradientSplitMTiles, MmaGradientTiles, Resident,
};
use self::requirements::check;
use self::shape::{Shape, split_d, split_m, without_queries};
pub use self::tiles::MmaForwardTiles;
use crate::auxiliary::mask_bits::plan::check_mask;
use crate::engine::tiling::{heads_of_tile, num_splits_heuristic, query_tiles, splits};
use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::types::device::DeviceProfile;
use crate::types::quantized::CodeFormat;
use crate::types::refusal::Refusal;
use crate::types::request::{Layouts, Operands, Pass};
use cube_kit::hopper::ASSUMED_MULTIPROCESSORS;
use cube_kit::nvidia::Half;

/// The largest number of query rows (`q_len` times the query heads of a group) for which the selection tries this
/// engine's forward before all other engines. The columns `mma` and `wgmma` of the table give GB/s on one H200
/// (2026-11-23, bf16, 32,768 keys), measured by the benchmark with `--engine mma,unit` and `--engine wgmma,unit`:
///
/// | head size | rows | mma | wgmma |
/// |---|---|---|---|
/// | D64 | 8 | 3,805 | 2,707 |
/// | D128 | 4 | 4,175 | 4,147 |
/// | D256 | 2 | 4,510 | 4,489 |
/// | D512 | 8 | 4,342 | 3,996 |
/// | D256 | 32 | 4,082 | 4,095 |
/// | D512 | 32 | 4,235 | 3,958 |
/// | D512 | 64 | 1,364 | 1,475 |
///
/// The backward keeps the usual order of engines, because wgmma is faster at most head sizes. The next table gives the time
/// of the backward in µs, for one query of 8 heads over 131,072 keys on one H100 (2026-11-27, bf16, cases `cliffs-1-query`):
///
/// | case | mma | wgmma |
/// |---|---|---|
/// | D64 | 417 | 436 |
/// | D256 | 2,266 | 1,374 |
/// | D64, a group of 8 heads | 268 | 228 |
pub(super) const FIRST_ROWS: usize = 32;

/// The plan of a forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MmaForwardPlan {
    /// The tiles of the kernel. The variant of this enum tells how the warps divide the tiles.
    pub tiles: MmaForwardTiles,
    /// The number of query heads that share a tile, all from one GQA group. In a shared tile, the rows of one head precede
    /// the rows of the next head.
    pub heads: usize,
    /// The number of splits of the keys (split-KV). With 1 split, the kernel writes the final output, and no second
    /// kernel combines partial outputs.
    pub splits: usize,
    /// The number of heads whose tiles are in flight at the same time. Heads of different sequences count separately.
    /// The number is 1 if the problem has no causal mask, no segments and no key intervals. Otherwise the plan limits
    /// the number so that the operands of these heads stay in the L2 cache.
    pub together: usize,
    /// The operands that must be copied before the kernel starts. The rows of a copy start and end at multiples of 16
    /// bytes.
    pub copies: Operands,
}

/// The table of the forward's tiles. The plan takes the first entry that serves the problem's head sizes and fits the
/// device's shared memory. Every head size has an entry that fits 99 KB, and may have others that fit only 163 or 227
/// KB.
///
/// The comments give TFLOP/s on one H200 (2026-11-23), bf16, with 4,096 queries and keys. In a pair of numbers, the
/// first is for the problem without a mask, and the second for the problem with a causal mask.
const FORWARD: &[Shape] = &[
    // At head size 64, the next tiles reach 316 TFLOP/s on an H200 without a mask and 298 causal. Other tiles under a
    // causal mask, in TFLOP/s: 294 with blocks of 32 keys; 302 with blocks of 128 keys; 295 with warps of 16 rows; 289
    // with warps of 16 rows and blocks of 128 keys; 297 with one block of V in shared memory. With the next tiles, two
    // CTAs share a multiprocessor.
    split_m([64, 64], [4, 2, 64]),
    // At head size 128, the next tiles reach 362 TFLOP/s on an H200 without a mask and 335 causal. In an earlier
    // version of the kernel, these tiles reached 330 causal. In that version, tiles with blocks of 64 keys reached 369
    // without a mask and 341 causal. Other tiles under a causal mask, in TFLOP/s: 326 with one block of V in shared
    // memory; 317 with one block of K and one of V; 295 with warps of 16 rows; 306 with 8 warps; 245 with 8 warps of 16
    // rows. With the next tiles, two CTAs share a multiprocessor.
    split_m([128, 128], [4, 2, 32]),
    // At head size 256, the next tiles reach 347 TFLOP/s on an H200 without a mask and 328 causal. Other tiles, without a
    // mask and causal, in TFLOP/s: 340 and 318 with one buffer for P; 344 and 326 if each warp has 64 × 64 elements of the
    // output; 323 and 308 with chunks of half the columns.
    split_d([256, 256], [128, 64, 4], [256, 64, 1, 3, 2]),
    // At head size 256, the next tiles reach 327 TFLOP/s on an H200 without a mask and 312 causal. One buffer for P and five
    // slots for chunks give 320 and 302 TFLOP/s.
    split_d([256, 256], [128, 64, 4], [128, 32, 1, 4, 2]),
    // At head size 256, the next tiles reach 282 TFLOP/s on an H200 without a mask and 280 causal. Other tiles that fit 163
    // KB of shared memory, without a mask and causal, in TFLOP/s: 243 and 238 with blocks of 64 keys; 217 and 219 for split-D
    // with 64 rows and blocks of 64 keys; 166 and 151 for split-D with 128 rows and two slots of 16 keys.
    split_m([256, 256], [4, 1, 32]),
    split_d([320, 320], [64, 128, 2], [128, 32, 1, 4, 2]),
    split_d([320, 320], [64, 128, 2], [64, 16, 1, 5, 2]),
    split_d([320, 320], [64, 64, 2], [64, 16, 1, 4, 2]),
    // At head size 512, the next tiles reach 346 TFLOP/s on an H200 without a mask and 323 causal. Other tiles, without a
    // mask and causal, in TFLOP/s: 319 and 304 with one buffer for P; 304 and 286 with eight slots of half the columns.
    split_d([512, 512], [64, 128, 1], [128, 32, 1, 4, 2]),
    // At head size 512, the next tiles reach 299 TFLOP/s on an H200 without a mask and 284 causal. One buffer for P and five
    // slots for chunks give 286 and 272 TFLOP/s.
    split_d([512, 512], [64, 128, 1], [64, 16, 1, 4, 2]),
    // At head size 512, the next tiles reach 249 TFLOP/s on an H200 without a mask and 245 causal. Other tiles, without a
    // mask and causal, in TFLOP/s: 146 and 152 with two slots and two buffers for P; 209 and 171 with 32 rows and queries
    // that stay in shared memory; 179 and 168 with blocks of 64 keys and chunks of half the columns of V.
    without_queries(split_d([512, 512], [64, 128, 1], [64, 16, 1, 3, 1])),
    split_d([WIDEST_DOTS, 512], [64, 128, 1], [128, 32, 1, 4, 1]),
    split_d([WIDEST_DOTS, 512], [64, 128, 1], [64, 16, 1, 4, 1]),
    // The next tiles were not measured. The kernel copies the queries again with every block of keys, because queries that
    // stay in shared memory would leave room for only two slots for chunks of K and V. At head size 512, tiles with two slots
    // reached only 107 TFLOP/s on an H200 without a mask and 96 causal.
    without_queries(split_d([WIDEST_DOTS, 512], [64, 128, 1], [64, 16, 1, 3, 1])),
];

/// The largest head size of Q and K that leaves room in shared memory for the slots of operand chunks.
const WIDEST_DOTS: usize = 576;

/// Plans the forward of `problem`, or returns the reason for a refusal. With `as_backward`, the plan takes tiles whose
/// kernel sums `q·k` in the order in which the backward sums it. Forward and backward then round each score alike.
pub(super) fn forward(
    problem: &AttentionProblem,
    device: &DeviceProfile,
    layouts: Layouts,
    as_backward: bool,
) -> Result<MmaForwardPlan, Refusal> {
    let half = check(problem, device)?;
    let AttentionProblem {
        head_dim,
        value_dim,
        ..
    } = *problem;
    let limits = [device.shared_memory, device.units_per_cube];
    let rows = problem.q_len * problem.group().max(1);
    let few_rows = match problem.quantized {
        Some(format) => Some(code_tiles(rows, problem, format, layouts, half, limits)?),
        None => few_rows_tiles(rows, [head_dim, value_dim], half, limits, problem.page_len),
    };
    let few_rows = few_rows.filter(|tiles| !as_backward || sums_as_backward(tiles));
    let tiles = match few_rows {
        Some(tiles) => tiles,
        None => forward_tiles(head_dim, value_dim, half, limits)?,
    };
    let heads = heads_of_tile(problem, tiles.rows());
    let query_tiles = query_tiles(problem, tiles.rows(), heads);
    check_mask(problem, [(Side::Queries, tiles.rows(), tiles.keys())])?;
    let multiprocessors = device.multiprocessors.unwrap_or(ASSUMED_MULTIPROCESSORS);
    let cubes = tiles.cubes_per_multiprocessor(device.shared_memory) * multiprocessors;
    let block = [tiles.rows(), tiles.keys_at_once()];
    let splits = match few_rows {
        Some(_) => num_splits_heuristic(problem, block, query_tiles.all, cubes),
        None => splits(problem, block, query_tiles.all, cubes),
    };
    Ok(MmaForwardPlan {
        tiles,
        heads,
        splits,
        together: query_tiles.together,
        copies: layouts.tma.others(Pass::Forward),
    })
}

/// Returns the tiles of the kernel that reads quantized keys and values directly. The keys and values are not converted
/// to bf16 in memory beforehand.
fn code_tiles(
    rows: usize,
    problem: &AttentionProblem,
    format: CodeFormat,
    layouts: Layouts,
    half: Half,
    limits: [usize; 2],
) -> Result<MmaForwardTiles, Refusal> {
    // Refuse keys and values that would first need a copy to aligned rows. The copy of all of K and V would take longer
    // than another engine takes.
    if !layouts.tma.key || !layouts.tma.value {
        return Err(Refusal::Quantized(
            "this engine reads rows of codes in pieces of 16 bytes; expected rows that start and end at multiples of 16 bytes",
        ));
    }
    if half == Half::F16 {
        return Err(Refusal::Quantized(
            "a probability times its value's scale may be too large or too small for F16",
        ));
    }
    let widths = [problem.head_dim, problem.value_dim];
    let tiles = decode_code_tiles(rows, widths, format, limits, problem.page_len);
    tiles.ok_or(Refusal::Quantized(
        "this engine has no tiles of codes for this number of rows and this head size",
    ))
}

/// Returns the first tiles in the table that serve these head sizes and that the device can run. A CTA of the device
/// has at most `shared_memory` bytes of shared memory and `units` threads.
pub(crate) fn forward_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    [shared_memory, units]: [usize; 2],
) -> Result<MmaForwardTiles, Refusal> {
    let mut tiles = FORWARD
        .iter()
        .filter(|shape| shape.is_for(head_dim, value_dim))
        .map(|shape| shape.tiles(head_dim, value_dim, half))
        .peekable();
    if tiles.peek().is_none() {
        let (widest_head, widest_value) = FORWARD.last().map(Shape::widest).unwrap_or_default();
        return Err(Refusal::Width {
            widest_head,
            widest_value,
            head_dim,
            value_dim,
        });
    }
    let fits =
        |tiles: &MmaForwardTiles| tiles.shared_memory() <= shared_memory && tiles.units() <= units;
    tiles.find(fits).ok_or(Refusal::Tiles {
        width: value_dim,
        shared_memory,
        units,
    })
}

#[cfg(test)]
mod tests {
    use super::split_d::MmaSplitDTiles;
    use super::*;
    use crate::engine::tiling::NARROWEST;
    use crate::testing::SHARED_MEMORY;
    use cube_kit::ampere::BARRIER_BYTES;
    use cube_kit::nvidia::ROW_BYTES;

    /// Checks that the table has forward tiles for every head size at each size of shared memory. The warps must divide
    /// split-D tiles evenly.
    #[test]
    fn forward_tiles_every_width_divides_evenly() {
        for head_dim in NARROWEST..=WIDEST_DOTS {
            for value_dim in [head_dim.min(512), 8, 80, 257, 512] {
                for shared_memory in SHARED_MEMORY {
                    let tiles =
                        forward_tiles(head_dim, value_dim, Half::Bf16, [shared_memory, 256]);
                    if let MmaForwardTiles::SplitD(tiles) =
                        tiles.expect("every head size has tiles")
                    {
                        check_division(&tiles);
                    }
                }
            }
        }
    }

    pub(super) fn check_division(tiles: &MmaSplitDTiles) {
        let context = format!("{tiles:?}");
        let warps = MmaSplitDTiles::WARPS;
        let score_groups = tiles.rows / tiles.score_rows();
        assert_eq!(score_groups * tiles.key_groups(), warps, "{context}");
        assert!(tiles.score_fragments() <= 2, "{context}");
        assert_eq!(
            tiles.row_groups * tiles.output_rows(),
            tiles.rows,
            "{context}"
        );
        // The number of output rows per warp must be a multiple of the number of score rows per warp. A warp then needs
        // only scores that the warps of its own row group compute.
        assert_eq!(tiles.output_rows() % tiles.score_rows(), 0, "{context}");
        assert_eq!(tiles.column_groups() % tiles.key_groups(), 0, "{context}");
        assert_eq!(tiles.column_groups() * tiles.row_groups, warps, "{context}");
        assert!(
            tiles.part_columns() * tiles.value_parts >= tiles.value_dim,
            "{context}"
        );
        // A lane keeps one bit for each key that it multiplies, which is four bits for each group of 16 keys. The bit
        // tells whether the key has a nonzero probability. One 32-bit word therefore covers at most 128 keys.
        assert!(tiles.keys <= 128, "{context}");
        assert_eq!(tiles.keys % tiles.value_keys, 0, "{context}");
        // When a warp has read chunk `i` of a pass (main loop iteration), it starts to copy chunk `i + slots − 1`. This
        // chunk must belong to the current pass or to the next pass. The ring buffer can therefore use at most
        // `chunks + 1` slots.
        assert!(
            tiles.slots >= 2 && tiles.slots <= tiles.chunks() + 1,
            "{context}"
        );
        assert!(
            tiles.vectors().iter().all(|&registers| registers <= 128),
            "{context}"
        );
        // The swizzle permutes 16-byte pieces by the row number modulo 8. Offsets and sizes must therefore be multiples of
        // eight rows of 128 bytes.
        let ring = tiles.ring();
        let permuted = [
            tiles.probabilities_at(),
            tiles.probability_bytes(),
            ring.slots_at,
            ring.slot_bytes,
        ];
        assert!(
            permuted.iter().all(|at| at.is_multiple_of(8 * ROW_BYTES)),
            "{context}"
        );
        for barriers in [tiles.meetings_at(), ring.barriers_at] {
            assert!(barriers.is_multiple_of(BARRIER_BYTES), "{context}");
        }
    }
}
