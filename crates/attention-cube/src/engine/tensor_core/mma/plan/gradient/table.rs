//! The tables of the backward's tiles, by head size and by the shared memory per CTA.

use self::Shape::{Columns, Rows};
use super::split_d::MmaGradientSplitDTiles;
use super::split_d::Resident::{self, All, Nothing, QOrK};
use super::split_m::MmaGradientSplitMTiles;
use super::tiles::MmaGradientTiles;
use crate::engine::tensor_core::mma::plan::ring::Ring;
use crate::math::side::{Side, Sums};
use crate::types::device::DeviceProfile;
use crate::types::refusal::Refusal;
use cube_kit::nvidia::Half;

/// The sizes of a kernel's tiles that a table row chooses.
#[derive(Clone, Copy)]
enum Shape {
    /// Split-M. The three numbers are warps per CTA, 16-row fragments per warp, and rows per streamed block (columns of
    /// the scores).
    Rows([usize; 3]),
    /// Split-D. The first field says which operands stay in shared memory. The five numbers are: rows per tile; rows
    /// per streamed block (columns of the scores); columns per chunk for S or dP; rows per chunk for the gradient GEMM;
    /// the largest number of slots in the ring buffer.
    Columns(Resident, [usize; 5]),
}

/// A table row: the tiles of the kernels for head sizes up to `width`, on GPUs with at least `shared_memory` KB of
/// shared memory per CTA.
struct Row {
    width: usize,
    shared_memory: usize,
    query: Shape,
    key: Shape,
    /// The tiles of a kernel that computes only dV, or `None` if the registers of one kernel can hold dK and dV.
    value: Option<Shape>,
}

const fn row(
    [width, shared_memory]: [usize; 2],
    query: Shape,
    key: Shape,
    value: Option<Shape>,
) -> Row {
    Row {
        width,
        shared_memory,
        query,
        key,
        value,
    }
}

/// The table of the backward's tiles. The plan takes the first row that serves the problem's head sizes and fits the
/// device's shared memory. For split-D, at least three slots of the ring buffer must fit there.
///
/// Split-M runs two CTAs of four warps on a multiprocessor if they fit, else one CTA of eight warps. With eight warps, one
/// warp multiplies while another computes P and dS.
///
/// Split-D uses blocks of 128 score columns or tiles of 128 rows, so that each warp computes 32 × 32 scores. Such a
/// warp reads two thirds of the operand bytes of two warps with 16 × 32 scores each.
const ROWS: &[Row] = &[
    row([64, 99], Rows([4, 2, 32]), Rows([4, 2, 32]), None),
    row([128, 227], Rows([4, 2, 32]), Rows([8, 1, 64]), None),
    row([128, 163], Rows([8, 1, 64]), Rows([8, 1, 64]), None),
    row([128, 99], Rows([8, 1, 32]), Rows([8, 1, 32]), None),
    row(
        [256, 227],
        Columns(All, [128, 64, 64, 16, 6]),
        Columns(All, [64, 128, 128, 32, 4]),
        None,
    ),
    row(
        [256, 163],
        Columns(All, [64, 128, 64, 16, 5]),
        Columns(All, [64, 128, 64, 16, 4]),
        None,
    ),
    row(
        [256, 99],
        Columns(Nothing, [64, 128, 64, 16, 3]),
        Columns(QOrK, [64, 64, 64, 16, 3]),
        None,
    ),
    row(
        [512, 227],
        Columns(QOrK, [64, 128, 128, 32, 3]),
        Columns(QOrK, [64, 128, 128, 32, 3]),
        Some(Columns(All, [64, 128, 128, 32, 4])),
    ),
    // This table row serves problems with a bias, in which shared memory holds a third f32 per query. With this third
    // f32, the tiles of the previous table row would leave room for fewer than three slots of the ring buffer.
    row(
        [512, 227],
        Columns(All, [64, 128, 64, 16, 6]),
        Columns(All, [64, 128, 64, 16, 6]),
        Some(Columns(All, [64, 128, 128, 32, 4])),
    ),
    row(
        [512, 163],
        Columns(Nothing, [64, 128, 64, 16, 6]),
        Columns(Nothing, [64, 128, 64, 16, 6]),
        Some(Columns(All, [64, 128, 64, 16, 5])),
    ),
    row(
        [512, 99],
        Columns(Nothing, [64, 128, 64, 16, 3]),
        Columns(Nothing, [64, 128, 64, 16, 3]),
        Some(Columns(Nothing, [64, 128, 64, 16, 3])),
    ),
];

/// The tiles of three kernels: the kernels for dQ, for dK, and for dV. The last entry is `None` if the kernel for dK
/// also computes dV.
type Kernels = (MmaGradientTiles, MmaGradientTiles, Option<MmaGradientTiles>);

/// Returns tiles that serve these head sizes and fit the device. If `has_logarithms`, each query has three f32 (row
/// maximum, delta, logarithm of the row sum) instead of two (LSE and delta). For example, a problem with a bias needs
/// three.
pub(crate) fn gradient_tiles(
    head_dim: usize,
    value_dim: usize,
    half: Half,
    has_logarithms: bool,
    device: &DeviceProfile,
) -> Result<Kernels, Refusal> {
    let width = head_dim.max(value_dim);
    let mut rows = ROWS.iter().filter(|row| width <= row.width).peekable();
    if rows.peek().is_none() {
        let widest = ROWS.last().map_or(0, |row| row.width);
        return Err(Refusal::Width {
            widest_head: widest,
            widest_value: widest,
            head_dim,
            value_dim,
        });
    }
    let lse_delta = if has_logarithms { 3 } else { 2 };
    let kernels = |row: &Row| {
        let tiles = |side, sums, shape| match shape {
            Rows([warps, fragments, columns]) => MmaGradientTiles::SplitM(MmaGradientSplitMTiles {
                side,
                sums,
                head_dim,
                value_dim,
                half,
                lse_delta,
                warps,
                fragments,
                columns,
            }),
            Columns(resident, [rows, columns, score_columns, sum_rows, slots]) => {
                let tiles = MmaGradientSplitDTiles {
                    side,
                    sums,
                    head_dim,
                    value_dim,
                    half,
                    lse_delta,
                    rows,
                    columns,
                    resident,
                    score_columns,
                    sum_rows,
                    slots,
                };
                MmaGradientTiles::SplitD(with_slots(tiles, row.shared_memory << 10))
            }
        };
        let keys = match row.value {
            Some(_) => Sums::QOrK,
            None => Sums::Both,
        };
        let value = row.value;
        (
            tiles(Side::Queries, Sums::QOrK, row.query),
            tiles(Side::Keys, keys, row.key),
            value.map(|shape| tiles(Side::Keys, Sums::Values, shape)),
        )
    };
    let fits = |tiles: MmaGradientTiles| {
        tiles.units() <= device.units_per_cube
            && match tiles {
                MmaGradientTiles::SplitM(_) => true,
                MmaGradientTiles::SplitD(tiles) => tiles.slots >= LEAST_SLOTS,
            }
    };
    rows.filter(|row| row.shared_memory << 10 <= device.shared_memory)
        .map(kernels)
        .find(|(query, key, value)| fits(*query) && fits(*key) && value.is_none_or(fits))
        .ok_or(Refusal::Tiles {
            width,
            shared_memory: device.shared_memory,
            units: device.units_per_cube,
        })
}

/// Chooses the number of slots in the ring buffer. The maximum is the smallest of three numbers: the table's number of
/// slots, the number of chunks per block, and the number of slots that fit `shared_memory`. From 3 up to the maximum,
/// the function prefers the largest number that divides the number of chunks per block. If this range has no divisor,
/// the function takes the maximum. With a divisor, the slot of each chunk is known at compile time.
fn with_slots(tiles: MmaGradientSplitDTiles, shared_memory: usize) -> MmaGradientSplitDTiles {
    let per_slot = tiles.slot_bytes() + Ring::SLOT_BARRIERS;
    let beside = tiles.shared_memory() - tiles.slots * per_slot;
    let fit = (shared_memory - beside) / per_slot;
    let most = tiles.slots.min(fit).min(tiles.chunks());
    let even = (LEAST_SLOTS..=most).rfind(|slots| tiles.chunks().is_multiple_of(*slots));
    MmaGradientSplitDTiles {
        slots: even.unwrap_or(most),
        ..tiles
    }
}

/// The smallest number of slots in the ring buffer. While most warps read the chunk in one slot, slower warps may still
/// read the preceding chunk in a second slot. At the same time, copies fill a third slot.
const LEAST_SLOTS: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tiling::BackwardTiles;
    use crate::testing::{SHARED_MEMORY, card};
    use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
    use cube_kit::nvidia::{ROW_BYTES, SUBTILE};

    /// The largest head size.
    const WIDEST: usize = 512;

    /// Checks that the table has backward tiles for every head size at each size of shared memory. The warps must divide
    /// these tiles evenly.
    #[test]
    fn gradient_tiles_every_width_fits_and_divides_evenly() {
        for shared_memory in SHARED_MEMORY {
            let device = card(shared_memory);
            for width in 1..=WIDEST {
                for (head_dim, value_dim) in
                    [(width, width), (width, 8), (8, width), (width, WIDEST)]
                {
                    for has_logarithms in [false, true] {
                        let kernels = gradient_tiles(
                            head_dim,
                            value_dim,
                            Half::Bf16,
                            has_logarithms,
                            &device,
                        );
                        let (query, key, value) = kernels.unwrap_or_else(|refusal| {
                            panic!("no tiles for head sizes {head_dim} and {value_dim} in {shared_memory} bytes: {refusal}")
                        });
                        assert_eq!(query.side(), Side::Queries);
                        for tiles in [Some(query), Some(key), value].into_iter().flatten() {
                            assert!(tiles.shared_memory() <= shared_memory, "{tiles:?}");
                            match tiles {
                                MmaGradientTiles::SplitM(tiles) => check_split_m(&tiles),
                                MmaGradientTiles::SplitD(tiles) => check_split_d(&tiles),
                            }
                        }
                    }
                }
            }
        }
    }

    /// True if a subtile may start at byte offset `place`. The offset must be a multiple of eight rows, because the swizzle
    /// permutes 16-byte pieces by the row number modulo 8.
    fn is_subtile(place: usize) -> bool {
        place.is_multiple_of(8 * ROW_BYTES)
    }

    fn check_split_m(tiles: &MmaGradientSplitMTiles) {
        assert!([16, 32, 64].contains(&tiles.columns), "{tiles:?}");
        assert!([1, 2].contains(&tiles.fragments), "{tiles:?}");
        let offsets = [tiles.blocks_at(), tiles.block_values_at()];
        assert!(offsets.into_iter().all(is_subtile), "{tiles:?}");
        assert!(tiles.block_bytes().is_multiple_of(ROW_BYTES), "{tiles:?}");
    }

    fn check_split_d(tiles: &MmaGradientSplitDTiles) {
        let warps = MmaGradientSplitDTiles::WARPS;
        assert!([64, 128].contains(&tiles.rows), "{tiles:?}");
        assert!([64, 128].contains(&tiles.columns), "{tiles:?}");
        assert!([1, 2].contains(&tiles.score_fragments()), "{tiles:?}");
        let groups = tiles.rows / tiles.score_rows() * tiles.part_groups();
        assert_eq!(groups, warps, "{tiles:?}");
        let groups = tiles.gradients() * tiles.row_groups() * tiles.column_groups();
        assert_eq!(groups, warps, "{tiles:?}");
        // A warp stores one bit per score column. The bit is set if any of the warp's score rows has a nonzero element
        // in the column. All score rows of the warp must lie in one row group of the gradient. The number of rows in a
        // row group must therefore be a multiple of the score rows per warp.
        let rows = MmaGradientSplitDTiles::SUM_ROWS;
        assert!(rows.is_multiple_of(tiles.score_rows()), "{tiles:?}");
        assert!(tiles.score_columns.is_multiple_of(SUBTILE), "{tiles:?}");
        assert!(tiles.sum_rows.is_multiple_of(FRAGMENT_ROWS), "{tiles:?}");
        assert!(tiles.columns.is_multiple_of(tiles.sum_rows), "{tiles:?}");
        // An iteration of the main loop starts to copy only its own chunks and the chunks of the next iteration. More
        // slots than chunks per iteration would therefore stay unused.
        assert!(tiles.slots >= LEAST_SLOTS, "{tiles:?}");
        assert!(tiles.slots <= tiles.chunks(), "{tiles:?}");
        let offsets = [
            tiles.stationary_values_at(),
            tiles.factors_at(),
            tiles.factor_bytes(),
            tiles.ring_at(),
            tiles.tile_rows_at(),
            tiles.sum_bytes(),
            tiles.slot_bytes(),
        ];
        assert!(offsets.into_iter().all(is_subtile), "{tiles:?}");
        // The kernels copy LSE and delta in units of 16 bytes.
        assert!(tiles.lse_delta_at().is_multiple_of(16), "{tiles:?}");
        assert!(tiles.term_bytes().is_multiple_of(16), "{tiles:?}");
        assert!(
            tiles.ring().barriers_at.is_multiple_of(BARRIER_BYTES),
            "{tiles:?}"
        );
        assert!(
            tiles.vectors().iter().all(|&registers| registers <= 128),
            "{tiles:?}"
        );
    }

    #[test]
    fn gradient_tiles_wider_heads_are_refused() {
        for (head_dim, value_dim) in [(WIDEST + 1, 64), (64, WIDEST + 1), (576, WIDEST)] {
            let tiles = gradient_tiles(head_dim, value_dim, Half::F16, false, &card(227 << 10));
            assert!(matches!(tiles, Err(Refusal::Width { .. })), "{tiles:?}");
        }
    }
}
