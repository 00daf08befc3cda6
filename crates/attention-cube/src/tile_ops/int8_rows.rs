//! Reads the rows of quantized keys and values: 32-bit words of four int8 codes, with the first column in the lowest byte.
//!
//! Budget: no shared memory, and a word and four floats in registers. Each code costs an integer operation and a
//! subtraction. Kernels multiply a row's scale into each score or each probability.

use super::vec4::{Four, zeros};
use crate::types::quantized::CODES;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// The number 2²³. The mantissa bits of a float from 2²³ to below 2²⁴ hold the difference of the float and 2²³, as an integer.
const WHOLE: f32 = 8_388_608.0;

/// True if an operand of element type `E` consists of packed int8 words.
#[cube]
pub(crate) fn is_packed_int8<E: Numeric>() -> comptime_type!(bool) {
    let element = elem_type_of::<E>();
    comptime!(matches!(element, ElemType::UInt(_)))
}

/// Returns the word that starts at column `column` of the row at `offset`.
#[cube]
pub(super) fn word_at<E: Numeric, N: Size>(
    source: &Tensor<Vector<E, N>>,
    offset: usize,
    column: u32,
) -> u32 {
    u32::cast_from(source[offset + (column / comptime!(CODES as u32)) as usize].extract(0usize))
}

/// Converts a word's codes to floats without an int-to-float instruction: puts the code plus 128 into the mantissa of
/// [`WHOLE`], then subtracts `WHOLE + 128`.
#[cube]
pub(crate) fn codes<C: Float>(word: u32) -> Four<C> {
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
