//! Copies the rows of (row, chosen expert) pairs to tiles and back. Each tile holds rows of only one expert. Another
//! kernel adds up the weighted outputs of each row's chosen experts.
//!
//! The tiles form the padded matrix, and a slot is a row of this matrix. The index of an expert's first slot is a
//! multiple of the number of rows in a tile.
//!
//! Budget: a cube moves [`ROWS`] rows, and [`UNITS_OF_ROW`] units move a row in vectors of 16 bytes. Bound: memory
//! bandwidth.

use cubecl::prelude::*;

/// The number of units that build the table of tiles.
pub(super) const TABLE_UNITS: usize = 256;
/// The number of rows that a cube moves.
pub(super) const ROWS: usize = 8;
/// The number of units that move a row.
pub(super) const UNITS_OF_ROW: usize = 32;

/// The direction of a copy between the rows of pairs and the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Direction {
    /// From the rows of pairs to slots. Slots without a pair become zero.
    ToSlots,
    /// From slots to the rows of pairs.
    ToPairs,
}

/// Writes the table of tiles. In this order, `table` holds the index of each expert's first tile, the number of all
/// tiles, and the expert of each tile. `starts[e]` is the index of expert `e`'s first pair in the list that is sorted
/// by expert.
#[cube(launch_unchecked)]
pub(super) fn tile_table(
    starts: &Tensor<i32>,
    table: &mut Tensor<i32>,
    experts: u32,
    #[comptime] tile_rows: u32,
) {
    let mut expert = UNIT_POS;
    while expert < experts {
        let mut first = 0u32;
        let mut earlier = 0u32;
        while earlier < expert {
            first += tiles_of(starts, earlier, tile_rows);
            earlier += 1u32;
        }
        let end = first + tiles_of(starts, expert, tile_rows);
        table[expert as usize] = i32::cast_from(first);
        if expert == experts - 1u32 {
            table[experts as usize] = i32::cast_from(end);
        }
        let mut tile = first;
        while tile < end {
            table[(experts + 1u32 + tile) as usize] = i32::cast_from(expert);
            tile += 1u32;
        }
        expert += comptime!(TABLE_UNITS as u32);
    }
}

/// Returns the number of tiles of an expert.
#[cube]
fn tiles_of(starts: &Tensor<i32>, expert: u32, #[comptime] tile_rows: u32) -> u32 {
    let pairs = u32::cast_from(starts[expert as usize + 1] - starts[expert as usize]);
    pairs.div_ceil(tile_rows)
}

/// The position of a slot's pair in the list of pairs that is sorted by expert.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct PlaceInOrder {
    /// The index of the pair in the list that is sorted by expert.
    index: u32,
    /// True if the slot holds a pair. False if the slot lies after the last pair of its expert.
    has_pair: bool,
}

/// Returns the position of a slot's pair in the list that is sorted by expert. The slot must be in a used tile.
#[cube]
fn place_in_order(
    starts: &Tensor<i32>,
    table: &Tensor<i32>,
    experts: u32,
    slot: u32,
    #[comptime] tile_rows: u32,
) -> PlaceInOrder {
    let expert = u32::cast_from(table[(experts + 1u32 + slot / tile_rows) as usize]);
    let first_slot = u32::cast_from(table[expert as usize]) * tile_rows;
    let index = u32::cast_from(starts[expert as usize]) + slot - first_slot;
    PlaceInOrder {
        index,
        has_pair: index < u32::cast_from(starts[expert as usize + 1]),
    }
}

/// The sizes of a copy by [`move_rows()`].
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct MoveSizes {
    pub experts: u32,
    /// The number of vectors in a row.
    pub vectors: u32,
    /// The distance between consecutive rows of the source, in vectors.
    pub source_stride: u32,
    pub target_stride: u32,
    /// The number of consecutive pairs that share one row outside the padded matrix. A copy to slots reads this row,
    /// and a copy from slots writes this row.
    pub of_row: u32,
}

/// Copies the rows of all used tiles. `order` lists the pairs sorted by expert, and `table` is the result of
/// [`tile_table()`].
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn move_rows<E: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    target: &mut Tensor<Vector<E, N>>,
    order: &Tensor<i32>,
    starts: &Tensor<i32>,
    table: &Tensor<i32>,
    sizes: MoveSizes,
    #[comptime] direction: Direction,
    #[comptime] tile_rows: u32,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let slot = CUBE_POS as u32 * comptime!(ROWS as u32) + UNIT_POS / comptime!(UNITS_OF_ROW as u32);
    if slot / tile_rows >= u32::cast_from(table[sizes.experts as usize]) {
        terminate!();
    }
    let PlaceInOrder { index, has_pair } =
        place_in_order(starts, table, sizes.experts, slot, tile_rows);
    let mut vector = UNIT_POS % comptime!(UNITS_OF_ROW as u32);
    if has_pair {
        let pair = u32::cast_from(order[index as usize]);
        let outside = pair / sizes.of_row;
        let mut from = slot as usize;
        let mut to = outside as usize;
        if comptime!(direction == Direction::ToSlots) {
            from = outside as usize;
            to = slot as usize;
        }
        from *= sizes.source_stride as usize;
        to *= sizes.target_stride as usize;
        while vector < sizes.vectors {
            target[to + vector as usize] = source[from + vector as usize];
            vector += comptime!(UNITS_OF_ROW as u32);
        }
    } else if comptime!(direction == Direction::ToSlots) {
        let to = slot as usize * sizes.target_stride as usize;
        while vector < sizes.vectors {
            target[to + vector as usize] = Vector::<E, N>::cast_from(0.0f32);
            vector += comptime!(UNITS_OF_ROW as u32);
        }
    }
}

/// Writes the slot of each pair. `order`, `starts` and `table` are the same as in [`move_rows()`].
#[cube(launch_unchecked)]
pub(super) fn slots_of_pairs(
    order: &Tensor<i32>,
    starts: &Tensor<i32>,
    table: &Tensor<i32>,
    slots: &mut Tensor<i32>,
    experts: u32,
    #[comptime] tile_rows: u32,
) {
    let slot = ABSOLUTE_POS as u32;
    if slot / tile_rows < u32::cast_from(table[experts as usize]) {
        let PlaceInOrder { index, has_pair } =
            place_in_order(starts, table, experts, slot, tile_rows);
        if has_pair {
            let pair = u32::cast_from(order[index as usize]);
            slots[pair as usize] = i32::cast_from(slot);
        }
    }
}

/// The sizes for [`weighted_sums()`].
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct SumSizes {
    pub rows: u32,
    /// The number of experts chosen for each row. Each choice makes one (row, chosen expert) pair.
    pub top_k: u32,
    /// The number of vectors in a row.
    pub vectors: u32,
    /// The distance between consecutive rows of the source, in vectors.
    pub source_stride: u32,
    pub target_stride: u32,
}

/// Adds up the slots (rows of the padded matrix) of each row's pairs, weighted by `weights`, `[rows, top_k]`. Sums in
/// f32, and rounds once.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn weighted_sums<E: Float, N: Size>(
    source: &Tensor<Vector<E, N>>,
    slots: &Tensor<i32>,
    weights: &Tensor<f32>,
    target: &mut Tensor<Vector<E, N>>,
    sizes: SumSizes,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let row = CUBE_POS as u32 * comptime!(ROWS as u32) + UNIT_POS / comptime!(UNITS_OF_ROW as u32);
    if row >= sizes.rows {
        terminate!();
    }
    let mut vector = UNIT_POS % comptime!(UNITS_OF_ROW as u32);
    while vector < sizes.vectors {
        let mut sum = Vector::<f32, N>::cast_from(0.0f32);
        let mut pair = row * sizes.top_k;
        let end = pair + sizes.top_k;
        while pair < end {
            let slot = u32::cast_from(slots[pair as usize]) as usize;
            let at = slot * sizes.source_stride as usize + vector as usize;
            let weight = Vector::<f32, N>::cast_from(weights[pair as usize]);
            sum += Vector::cast_from(source[at]) * weight;
            pair += 1u32;
        }
        target[row as usize * sizes.target_stride as usize + vector as usize] =
            Vector::cast_from(sum);
        vector += comptime!(UNITS_OF_ROW as u32);
    }
}
