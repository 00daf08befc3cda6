//! Words of int8 of rows, and rows of words: `quantized.rs` says what they are.
//!
//! Budget: [`quantize`] has a word a unit in shared memory and a word's numbers in registers, [`dequantize`] four words and their scales in
//! registers. Both are bound by memory: the first reads a row twice, the second time from the cache, and the second writes two or four times
//! what it reads, of the rows that an attention reads and of no others.

use crate::math::layout::{head_rows, row_offset};
use crate::math::rounding::rounded_vector;
use crate::math::visibility::{Extent, Structure, sight, visible_keys};
use crate::quantized::{CODES, LARGEST, ZERO_BELOW};
use crate::tile::product::load_vec4;
use crate::tile::words::codes;
use cubecl::prelude::*;

/// Units of a cube that quantizes a row.
pub(super) const UNITS: usize = 64;

/// Units of a cube that dequantizes rows.
pub(super) const DEQUANTIZE_UNITS: usize = 256;

/// Words of a unit whose reads are on their way together.
pub(super) const WORDS_OF_UNIT: usize = 4;

/// The bits of infinity; those of NaN are more.
const INFINITE: u32 = 0x7f80_0000;

/// Writes the words of rows, and their scales, into the slots that the rows are in; with `positions`, one a row of each sequence, from where a
/// ring of as many slots as there are rows has them to where a ring of the words' slots has them. `not_a_number` is one: not every shading
/// language has it.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn quantize<E: Float, I: Int, N: Size>(
    rows: &Tensor<Vector<E, N>>,
    positions: ComptimeOption<&Tensor<I>>,
    words: &mut Tensor<u32>,
    scales: &mut Tensor<f32>,
    heads: u32,
    length: u32,
    columns: u32,
    all_rows: usize,
    not_a_number: f32,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
    #[define(N)] _vector: usize,
) {
    let row = CUBE_POS;
    if row >= all_rows {
        terminate!();
    }
    let mut from = (row % length as usize) as u32;
    let mut to = from as usize;
    let plane = row / length as usize;
    let head = (plane % heads as usize) as u32;
    let batch = (plane / heads as usize) as u32;
    #[comptime]
    match &positions {
        ComptimeOption::Some(positions) => {
            let position = u32::cast_from(positions[(batch * length + from) as usize]);
            from = position % length;
            to = position as usize % words.shape(2);
        }
        ComptimeOption::None => {}
    }
    let of_head = head_rows(rows, batch, head, 0i32, length as i32, columns);
    let offset = row_offset(&of_head, from, false);
    let word_at =
        batch as usize * words.stride(0) + head as usize * words.stride(1) + to * words.stride(2);
    let scale_at = batch as usize * scales.stride(0)
        + head as usize * scales.stride(1)
        + to * scales.stride(2);
    let words_of_row = columns / comptime!(CODES as u32);

    // Magnitudes by their bits, which are in the same order, with what is no number last.
    let mut largest = 0u32;
    let mut word = UNIT_POS;
    while word < words_of_row {
        let values = load_vec4(rows, &of_head, offset, word * comptime!(CODES as u32));
        #[unroll]
        for lane in 0..comptime!(CODES) {
            largest = max(
                largest,
                u32::reinterpret(values.extract(lane)) & 0x7fff_ffffu32,
            );
        }
        word += comptime!(UNITS as u32);
    }
    let mut found = Shared::<[u32]>::new_slice(comptime!(UNITS));
    found[UNIT_POS as usize] = largest;
    sync_cube();
    for unit in 0..comptime!(UNITS) {
        largest = max(largest, found[unit]);
    }

    let is_number = largest < comptime!(INFINITE);
    let has_codes = is_number && largest >= comptime!(ZERO_BELOW);
    let scale = f32::reinterpret(select(has_codes, largest, 0u32)) / comptime!(LARGEST);
    if UNIT_POS == 0u32 {
        scales[scale_at] = select(is_number, scale, not_a_number);
    }
    let mut word = UNIT_POS;
    while word < words_of_row {
        let mut written = 0u32;
        if has_codes {
            let values = load_vec4(rows, &of_head, offset, word * comptime!(CODES as u32));
            #[unroll]
            for lane in 0..comptime!(CODES) {
                // Halves go up: what rounding does to them differs among devices.
                let code = (values.extract(lane) / scale + 0.5f32).floor();
                let code = clamp(code, comptime!(-LARGEST), comptime!(LARGEST));
                let byte = u32::cast_from(code + 128.0f32) ^ 128u32;
                written |= byte << comptime!((8 * lane) as u32);
            }
        }
        words[word_at + word as usize] = written;
        word += comptime!(UNITS as u32);
    }
}

/// Dequantizes all rows, or where `is_bounded` the rows from the first to the last that a query of the sequence sees by causal mask, window
/// and length. A cube takes `rows_of_cube` rows of its head at a time, and every `cubes_of_head`-th such group.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn dequantize<E: Float, N: Size>(
    words: &Tensor<u32>,
    scales: &Tensor<f32>,
    lengths: ComptimeOption<&Tensor<i32>>,
    rows: &mut Tensor<Vector<E, N>>,
    extent: Extent,
    heads: u32,
    planes: usize,
    length: u32,
    words_of_row: u32,
    rows_of_cube: u32,
    cubes_of_head: u32,
    #[comptime] is_bounded: bool,
    #[comptime] structure: Structure,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let plane = CUBE_POS / cubes_of_head as usize;
    if plane >= planes {
        terminate!();
    }
    let of_head = (CUBE_POS % cubes_of_head as usize) as u32;
    let batch = plane / heads as usize;
    let head = plane % heads as usize;
    let words_at = batch * words.stride(0) + head * words.stride(1);
    let scales_at = batch * scales.stride(0) + head * scales.stride(1);
    let mut first = 0u32;
    let mut end = length;
    if comptime!(is_bounded) {
        let sight = sight(&extent, &lengths, batch as u32, structure);
        let seen = visible_keys(&sight, 0i32, extent.q_len - 1i32, false);
        first = seen.first as u32;
        end = max(seen.end, 0i32) as u32;
    }
    let units = comptime!(DEQUANTIZE_UNITS as u32);
    let mut row = first + of_head * rows_of_cube;
    while row < end {
        let count = min(rows_of_cube, end - row) * words_of_row;
        let mut index = UNIT_POS;
        while index < count {
            // All words are asked for before the first of them is needed.
            let mut held = Vector::<u32, Const<WORDS_OF_UNIT>>::zeroed();
            let mut factors = Vector::<f32, Const<WORDS_OF_UNIT>>::zeroed();
            #[unroll]
            for i in 0..comptime!(WORDS_OF_UNIT) {
                let at = min(index + comptime!(i as u32) * units, count - 1u32);
                let position = (row + at / words_of_row) as usize;
                let word = (at % words_of_row) as usize;
                held.insert(
                    i,
                    words[words_at + position * words.stride(2) + word * words.stride(3)],
                );
                factors.insert(i, scales[scales_at + position * scales.stride(2)]);
            }
            #[unroll]
            for i in 0..comptime!(WORDS_OF_UNIT) {
                let at = index + comptime!(i as u32) * units;
                if at < count {
                    let numbers =
                        codes::<f32>(held.extract(i)) * Vector::cast_from(factors.extract(i));
                    let target = (plane * length as usize + row as usize) * words_of_row as usize;
                    rows[target + at as usize] =
                        Vector::cast_from(rounded_vector::<E, Const<4>>(numbers));
                }
            }
            index += comptime!((WORDS_OF_UNIT * DEQUANTIZE_UNITS) as u32);
        }
        row += cubes_of_head * rows_of_cube;
    }
}
