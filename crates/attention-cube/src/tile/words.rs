//! Words of four int8, the first column's lowest: what quantized keys and values are read as.
//!
//! Budget: no memory; a word and four floats in registers, an integer operation and a subtraction a number. A code is exact in every element
//! that is multiplied. Its row's scale is none of a word's: it is multiplied in once a score, and once a probability.

use super::product::{Four, zeros};
use crate::quantized::CODES;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// A float from here on, up to twice as much, has its integers in its lowest bits.
const WHOLE: f32 = 8_388_608.0;

/// Whether an operand of these elements consists of words.
#[cube]
pub(crate) fn are_words<E: Numeric>() -> comptime_type!(bool) {
    let element = elem_type_of::<E>();
    comptime!(matches!(element, ElemType::UInt(_)))
}

/// The word with the column, which is the first of it, of the row at `offset`.
#[cube]
pub(super) fn word_at<E: Numeric, N: Size>(
    source: &Tensor<Vector<E, N>>,
    offset: usize,
    column: u32,
) -> u32 {
    u32::cast_from(source[offset + (column / comptime!(CODES as u32)) as usize].extract(0usize))
}

/// A word's codes. No conversion of integers: under the exponent of [`WHOLE`], a code and 128 are a float's difference to that.
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
