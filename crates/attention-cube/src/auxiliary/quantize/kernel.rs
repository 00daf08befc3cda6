//! Quantizes rows to words of four 8-bit codes, and dequantizes them. The module `quantized.rs` describes the formats.
//!
//! Budget: [`quantize`] uses one word per unit in shared memory, and four elements in registers. [`quantize_e4m3`] has four
//! elements in registers. [`dequantize`] uses four words and their scales in registers. Bound: memory. [`quantize`] reads a row
//! twice, the second time from the cache. [`quantize_e4m3`] reads a row once. [`dequantize`] writes two or four times as many
//! bytes as it reads.

use crate::math::layout::{head_rows, row_offset};
use crate::math::rounding::rounded_vector;
use crate::math::visibility::{SeqLens, Structure, seq_info, visible_keys};
use crate::tile_ops::code_rows::{e4m3_code, numbers};
use crate::tile_ops::row_access::load_vec4;
use crate::types::quantized::{CODES, CodeFormat, LARGEST, ZERO_BELOW};
use cubecl::prelude::*;

/// The number of units per cube in [`quantize`], where a cube quantizes one row.
pub(super) const UNITS: usize = 64;

/// The number of units per cube in [`dequantize`].
pub(super) const DEQUANTIZE_UNITS: usize = 256;

/// The number of words that a unit of [`dequantize`] loads at once.
pub(super) const WORDS_OF_UNIT: usize = 4;

/// The f32 bits of +∞. If the magnitude bits of an f32 (all bits but the sign), read as an integer, exceed this number,
/// the f32 is NaN.
const INFINITE: u32 = 0x7f80_0000;

/// Quantizes rows, and writes their words and scales into the slots of a KV cache. A slot is the place of one row in
/// the cache. Each cube handles one row.
///
/// Without `positions`, row `i` goes to slot `i`. With `positions`, a cube handles one sequence position of one head.
/// The cube reads the source row whose index is the position modulo `length`, where `length` is the number of source
/// rows per head. The cube writes the slot whose index is the position modulo the number of slots. The argument
/// `not_a_number` is NaN, because some shading languages have no literal for NaN.
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

    // Compare the f32 bits of the magnitudes as integers, because these integers have the same order as the magnitudes.
    // NaN counts as the largest magnitude.
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
                // Round ties up with `floor(x + 0.5)`, because devices differ in how `round` treats ties.
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

/// The runtime sizes of [`quantize_e4m3`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct RowSizes {
    pub heads: u32,
    pub length: u32,
    pub columns: u32,
    /// The number of words of all rows.
    pub all_words: usize,
}

/// Divides each row by the row's scale, and packs the quotients as words of four e4m3 codes. Each unit writes one word.
/// `words` is contiguous.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn quantize_e4m3<E: Float, N: Size>(
    rows: &Tensor<Vector<E, N>>,
    scales: &Tensor<f32>,
    words: &mut Tensor<u32>,
    sizes: RowSizes,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let index = ABSOLUTE_POS;
    if index >= sizes.all_words {
        terminate!();
    }
    let words_of_row = (sizes.columns / comptime!(CODES as u32)) as usize;
    let word = (index % words_of_row) as u32;
    let row = index / words_of_row;
    let position = (row % sizes.length as usize) as u32;
    let plane = row / sizes.length as usize;
    let head = (plane % sizes.heads as usize) as u32;
    let batch = (plane / sizes.heads as usize) as u32;
    let of_head = head_rows(rows, batch, head, 0i32, sizes.length as i32, sizes.columns);
    let offset = row_offset(&of_head, position, false);
    let values = load_vec4(rows, &of_head, offset, word * comptime!(CODES as u32));
    let scale = scales[batch as usize * scales.stride(0)
        + head as usize * scales.stride(1)
        + position as usize * scales.stride(2)];
    let mut written = 0u32;
    #[unroll]
    for lane in 0..comptime!(CODES) {
        written |= e4m3_code(values.extract(lane) / scale) << comptime!((8 * lane) as u32);
    }
    words[index] = written;
}

/// The runtime sizes of a dequantization.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct DequantizeSizes {
    pub heads: u32,
    /// The number of heads over all sequences.
    pub planes: usize,
    pub length: u32,
    /// The number of packed words per row.
    pub words_of_row: u32,
    /// The number of rows that a cube dequantizes at once.
    pub rows_of_cube: u32,
    pub cubes_of_head: u32,
}

/// Dequantizes all rows, or only the visible range of rows if `is_bounded`. The visible range extends from the first to
/// the last row that any query of the sequence sees under causal mask, window and length.
///
/// A head has groups of `rows_of_cube` rows. A cube dequantizes every `cubes_of_head`-th group of its head.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn dequantize<E: Float, N: Size>(
    words: &Tensor<u32>,
    scales: &Tensor<f32>,
    lengths: ComptimeOption<OwnedTensor<i32>>,
    rows: &mut Tensor<Vector<E, N>>,
    seq_lens: SeqLens,
    sizes: DequantizeSizes,
    #[comptime] is_bounded: bool,
    #[comptime] format: CodeFormat,
    #[comptime] structure: Structure,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let DequantizeSizes {
        heads,
        planes,
        length,
        words_of_row,
        rows_of_cube,
        cubes_of_head,
    } = sizes;
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
        let seq_info = seq_info(&seq_lens, &lengths, batch as u32, structure);
        let seen = visible_keys(&seq_info, 0i32, seq_lens.q_len - 1i32, false, structure);
        first = seen.first as u32;
        end = max(seen.end, 0i32) as u32;
    }
    let units = comptime!(DEQUANTIZE_UNITS as u32);
    let mut row = first + of_head * rows_of_cube;
    while row < end {
        let count = min(rows_of_cube, end - row) * words_of_row;
        let mut index = UNIT_POS;
        while index < count {
            // Load all words before using the first word, so that the loads overlap.
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
                    let numbers = numbers::<f32>(held.extract(i), format)
                        * Vector::cast_from(factors.extract(i));
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
