//! Which tiles the backward has for operands of a width, by the shared memory of a cube.

use self::Shape::{Columns, Rows};
use super::Held::{All, Dots, Nothing};
use super::{GradientSplitDTiles, GradientSplitMTiles, GradientTiles, Held};
use crate::device::DeviceProfile;
use crate::engine::mma::plan::ring::Ring;
use crate::math::side::{Side, Sums};
use crate::select::Refusal;
use cube_kit::hopper::Half;

/// The part of a kernel's tiles that is chosen.
#[derive(Clone, Copy)]
enum Shape {
    /// Split-M: warps, fragments of each, and columns.
    Rows([usize; 3]),
    /// Split-D: what stays; rows, columns, columns of a chunk for scores, rows of a chunk of what is summed, and slots at most.
    Columns(Held, [usize; 5]),
}

/// The kernels for operands of up to this width, on cards whose cubes may take so many KB of shared memory.
struct Row {
    width: usize,
    shared_memory: usize,
    query: Shape,
    key: Shape,
    /// Where keys and values do not fit one kernel's registers.
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

/// The first that is wide enough, whose shared memory the device has and that has room there for three slots. By rows, two cubes of four warps share a multiprocessor, where
/// there is room for them, or one has eight: so that one warp multiplies while another makes weights. By columns, blocks of 128 columns, or
/// tiles of 128 rows, give each warp 32 × 32 scores, which read two thirds of what two times 16 × 32 do.
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
        Columns(Dots, [64, 64, 64, 16, 3]),
        None,
    ),
    row(
        [512, 227],
        Columns(Dots, [64, 128, 128, 32, 3]),
        Columns(Dots, [64, 128, 128, 32, 3]),
        Some(Columns(All, [64, 128, 128, 32, 4])),
    ),
    // With a bias, whose terms leave no room for three slots of the former.
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

/// Tiles of queries, of keys, and of values where these have a kernel of their own.
type Kernels = (GradientTiles, GradientTiles, Option<GradientTiles>);

/// The tiles for operands of this width, with a bias or without, that fit the device.
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
    let terms = if has_logarithms { 3 } else { 2 };
    let kernels = |row: &Row| {
        let tiles = |side, sums, shape| match shape {
            Rows([warps, fragments, columns]) => GradientTiles::SplitM(GradientSplitMTiles {
                side,
                sums,
                head_dim,
                value_dim,
                half,
                terms,
                warps,
                fragments,
                columns,
            }),
            Columns(held, [rows, columns, score_columns, sum_rows, slots]) => {
                let tiles = GradientSplitDTiles {
                    side,
                    sums,
                    head_dim,
                    value_dim,
                    half,
                    terms,
                    rows,
                    columns,
                    held,
                    score_columns,
                    sum_rows,
                    slots,
                };
                GradientTiles::SplitD(with_slots(tiles, row.shared_memory << 10))
            }
        };
        let keys = match row.value {
            Some(_) => Sums::Dots,
            None => Sums::Both,
        };
        let value = row.value;
        (
            tiles(Side::Queries, Sums::Dots, row.query),
            tiles(Side::Keys, keys, row.key),
            value.map(|shape| tiles(Side::Keys, Sums::Values, shape)),
        )
    };
    let fits = |tiles: GradientTiles| {
        tiles.units() <= device.units_per_cube
            && match tiles {
                GradientTiles::SplitM(_) => true,
                GradientTiles::SplitD(tiles) => tiles.slots >= LEAST_SLOTS,
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

/// The tiles with as many slots of those that they have as fit `shared_memory`: a bias has a number more of each query. Rather with
/// fewer, if these divide a block's chunks: each chunk then has the same place in every block, and it is known beforehand.
fn with_slots(tiles: GradientSplitDTiles, shared_memory: usize) -> GradientSplitDTiles {
    let per_slot = tiles.slot_bytes() + Ring::SLOT_BARRIERS;
    let beside = tiles.shared_memory() - tiles.slots * per_slot;
    let fit = (shared_memory - beside) / per_slot;
    let most = tiles.slots.min(fit).min(tiles.chunks());
    let even = (LEAST_SLOTS..=most).rfind(|slots| tiles.chunks().is_multiple_of(*slots));
    GradientSplitDTiles {
        slots: even.unwrap_or(most),
        ..tiles
    }
}

/// One is read, one has been read by some, and one is filled.
const LEAST_SLOTS: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::division::HeldTiles;
    use crate::testing::{SHARED_MEMORY, card};
    use cube_kit::ampere::{BARRIER_BYTES, FRAGMENT_ROWS};
    use cube_kit::hopper::{ROW_BYTES, SUBTILE};

    /// The widest operands.
    const WIDEST: usize = 512;

    /// Every width up to the limit has tiles for every size of shared memory that cards since Ampere have, and these divide as the
    /// kernels assume.
    #[test]
    fn every_width_has_tiles_that_fit() {
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
                            panic!("{head_dim}/{value_dim}, {shared_memory}: {refusal}")
                        });
                        assert_eq!(query.side(), Side::Queries);
                        for tiles in [Some(query), Some(key), value].into_iter().flatten() {
                            assert!(tiles.shared_memory() <= shared_memory, "{tiles:?}");
                            match tiles {
                                GradientTiles::SplitM(tiles) => check_split_m(&tiles),
                                GradientTiles::SplitD(tiles) => check_split_d(&tiles),
                            }
                        }
                    }
                }
            }
        }
    }

    /// The permutation of a row's pieces is by its number in the subtile.
    fn is_subtile(place: usize) -> bool {
        place.is_multiple_of(8 * ROW_BYTES)
    }

    fn check_split_m(tiles: &GradientSplitMTiles) {
        assert!([16, 32, 64].contains(&tiles.columns), "{tiles:?}");
        assert!([1, 2].contains(&tiles.fragments), "{tiles:?}");
        let places = [tiles.blocks_at(), tiles.block_values_at()];
        assert!(places.into_iter().all(is_subtile), "{tiles:?}");
        assert!(tiles.block_bytes().is_multiple_of(ROW_BYTES), "{tiles:?}");
    }

    fn check_split_d(tiles: &GradientSplitDTiles) {
        let warps = GradientSplitDTiles::WARPS;
        assert!([64, 128].contains(&tiles.rows), "{tiles:?}");
        assert!([64, 128].contains(&tiles.columns), "{tiles:?}");
        assert!([1, 2].contains(&tiles.score_fragments()), "{tiles:?}");
        let groups = tiles.rows / tiles.score_rows() * tiles.part_groups();
        assert_eq!(groups, warps, "{tiles:?}");
        let groups = tiles.gradients() * tiles.row_groups() * tiles.column_groups();
        assert_eq!(groups, warps, "{tiles:?}");
        // The rows of a warp's gradient are whole groups of rows of scores, whose used columns it is told.
        let rows = GradientSplitDTiles::SUM_ROWS;
        assert!(rows.is_multiple_of(tiles.score_rows()), "{tiles:?}");
        assert!(tiles.score_columns.is_multiple_of(SUBTILE), "{tiles:?}");
        assert!(tiles.sum_rows.is_multiple_of(FRAGMENT_ROWS), "{tiles:?}");
        assert!(tiles.columns.is_multiple_of(tiles.sum_rows), "{tiles:?}");
        // A pass fills slots of itself and of the next one.
        assert!(tiles.slots >= LEAST_SLOTS, "{tiles:?}");
        assert!(tiles.slots <= tiles.chunks(), "{tiles:?}");
        let places = [
            tiles.stationary_values_at(),
            tiles.factors_at(),
            tiles.factor_bytes(),
            tiles.ring_at(),
            tiles.tile_rows_at(),
            tiles.sum_bytes(),
            tiles.slot_bytes(),
        ];
        assert!(places.into_iter().all(is_subtile), "{tiles:?}");
        // Terms come in pieces of 16 bytes.
        assert!(tiles.terms_at().is_multiple_of(16), "{tiles:?}");
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
    fn wider_heads_are_refused() {
        for (head_dim, value_dim) in [(WIDEST + 1, 64), (64, WIDEST + 1), (576, WIDEST)] {
            let tiles = gradient_tiles(head_dim, value_dim, Half::F16, false, &card(227 << 10));
            assert!(matches!(tiles, Err(Refusal::Width { .. })), "{tiles:?}");
        }
    }
}
