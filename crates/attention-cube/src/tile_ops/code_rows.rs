//! Reads the rows of quantized keys and values. A row consists of 32-bit words of four 8-bit codes each, with the first
//! column in the lowest byte.
//!
//! Budget: no shared memory. One word and four floats are in registers. An int8 code costs an integer operation and a
//! subtraction, and an e4m3 code about eight operations. Kernels multiply each score by the scale of its row of K, and
//! each probability by the scale of its row of V.

use super::vec4::{Four, zeros};
use crate::types::quantized::{CODES, CodeFormat, LARGEST_E4M3};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The number 2²³. The mantissa bits of a float `x` from 2²³ to below 2²⁴ hold the integer `x − 2²³`.
const WHOLE: f32 = 8_388_608.0;

/// The smallest positive number of e4m3, 2⁻⁹. Codes below 8 represent multiples of this number.
const LEAST_E4M3: f32 = 1.0 / 512.0;

/// The exponent bias of f32 minus the exponent bias of e4m3, shifted to the exponent bits of an f32.
const BIASES: u32 = (127 - 7) << 23;

/// Returns the element type of words with codes in `format`: u32 for int8, and i32 for e4m3. The element types differ,
/// so that kernels can derive the format from an operand's element type.
pub(crate) fn word_element(format: CodeFormat) -> ElemType {
    match format {
        CodeFormat::Int8 => ElemType::UInt(cubecl::ir::UIntKind::U32),
        CodeFormat::E4m3 => ElemType::Int(cubecl::ir::IntKind::I32),
    }
}

/// True if the element type `E` of an operand is a word of four packed codes.
#[cube]
pub(crate) fn is_packed<E: Numeric>() -> comptime_type!(bool) {
    let element = elem_type_of::<E>();
    comptime!(matches!(element, ElemType::UInt(_) | ElemType::Int(_)))
}

/// Returns the word that holds the codes of the columns `column` to `column + 3` of a row. The row starts at index
/// `offset`.
#[cube]
pub(super) fn word_at<E: Numeric, N: Size>(
    source: &Tensor<Vector<E, N>>,
    offset: usize,
    column: u32,
) -> u32 {
    let word = source[offset + (column / comptime!(CODES as u32)) as usize].extract(0usize);
    let element = elem_type_of::<E>();
    if comptime!(matches!(element, ElemType::Int(_))) {
        u32::reinterpret(i32::cast_from(word))
    } else {
        u32::cast_from(word)
    }
}

/// Converts the four codes of a word to floats. The word's element type `E` determines the format of the codes.
#[cube]
pub(super) fn codes<E: Numeric, C: Float>(word: u32) -> Four<C> {
    let element = elem_type_of::<E>();
    if comptime!(matches!(element, ElemType::Int(_))) {
        numbers::<C>(word, CodeFormat::E4m3)
    } else {
        numbers::<C>(word, CodeFormat::Int8)
    }
}

/// Converts the four codes of a word to floats.
#[cube]
pub(crate) fn numbers<C: Float>(word: u32, #[comptime] format: CodeFormat) -> Four<C> {
    if comptime!(format == CodeFormat::E4m3) {
        e4m3_numbers::<C>(word)
    } else {
        int8_numbers::<C>(word)
    }
}

/// Converts int8 codes to floats without an int-to-float instruction. The function adds 128 to a code and puts the sum
/// into the mantissa of [`WHOLE`]. From the resulting float, the function subtracts `WHOLE + 128`.
#[cube]
fn int8_numbers<C: Float>(word: u32) -> Four<C> {
    let raised = word ^ 0x8080_8080u32;
    let mut codes = zeros::<C>();
    #[unroll]
    for lane in 0..comptime!(CODES) {
        let code = (raised >> comptime!((8 * lane) as u32)) & 255u32;
        let float = f32::reinterpret(code | comptime!(WHOLE.to_bits()));
        codes.insert(lane, C::cast_from(float - comptime!(WHOLE + 128.0)));
    }
    codes
}

/// Converts e4m3 codes to floats. For a code from 8 to 127, the f32 has the code's exponent and mantissa, but another
/// exponent bias. Smaller codes represent multiples of 2⁻⁹. The NaN codes become ±480.
#[cube]
fn e4m3_numbers<C: Float>(word: u32) -> Four<C> {
    let mut numbers = zeros::<C>();
    #[unroll]
    for lane in 0..comptime!(CODES) {
        let code = word >> comptime!((8 * lane) as u32);
        let magnitude = code & 127u32;
        let whole = f32::reinterpret(magnitude | comptime!(WHOLE.to_bits())) - comptime!(WHOLE);
        let small = u32::reinterpret(whole * comptime!(LEAST_E4M3));
        let normal = (magnitude << 20u32) + comptime!(BIASES);
        let bits = select(magnitude < 8u32, small, normal) | ((code & 128u32) << 24u32);
        numbers.insert(lane, C::cast_from(f32::reinterpret(bits)));
    }
    numbers
}

/// Rounds `x` to the nearest e4m3 number and returns the code of this number. Ties go to the even code. Numbers beyond
/// ±448 become ±448, and NaN becomes a NaN code.
#[cube]
pub(crate) fn e4m3_code(x: f32) -> u32 {
    let magnitude = u32::reinterpret(x) & 0x7fff_ffffu32;
    let clamped = min(magnitude, comptime!(LARGEST_E4M3.to_bits()));
    // Add 2¹⁹ − 1, which is almost half the value of the last kept bit, and add the last kept bit itself (0 or 1).
    // Together, the two additions round to the nearest code, with ties to even.
    let rounded = clamped + 0x7_ffffu32 + ((clamped >> 20u32) & 1u32);
    let normal = (rounded - comptime!(BIASES)) >> 20u32;
    // The addition of 2²³ rounds the magnitude to a multiple of 2⁻⁹, with ties to even.
    let whole = f32::reinterpret(clamped) * comptime!(1.0 / LEAST_E4M3) + comptime!(WHOLE);
    let small = u32::reinterpret(whole) & 255u32;
    let is_normal = clamped >= comptime!((8.0 * LEAST_E4M3).to_bits());
    let code = select(is_normal, normal, small) | select(x < 0.0f32, 128u32, 0u32);
    select(magnitude > comptime!(f32::INFINITY.to_bits()), 127u32, code)
}
