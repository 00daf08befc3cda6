//! Rounds f32 numbers to the element type of an output: to the nearest number, with ties to even.
//!
//! Vulkan lets the driver choose the rounding of a conversion to bf16, and NVIDIA's driver truncates. Integer
//! operations therefore round to bf16 before the conversion, which is then exact.

#![allow(
    missing_docs,
    reason = "CubeCL's macros generate public items without docs"
)]

use cubecl::ir::{ElemType, FloatKind};
use cubecl::prelude::*;

/// Rounds `value` to the nearest number of type `E`.
#[cube]
pub fn rounded<E: Float>(value: f32) -> E {
    E::cast_from(convertible::<E>(value))
}

/// Rounds each element of `values` to the nearest number of type `E`.
#[cube]
pub fn rounded_vector<E: Float, N: Size>(values: Vector<f32, N>) -> Vector<E, N> {
    if is_bfloat16::<E>() {
        let mut result = Vector::<f32, N>::empty();
        #[unroll]
        for lane in 0..values.vector_size() {
            result.insert(lane, convertible::<E>(values.extract(lane)));
        }
        Vector::cast_from(result)
    } else {
        Vector::cast_from(values)
    }
}

/// Rounds `value` such that a later conversion to `E` gives the number of type `E` that is nearest to the original
/// `value`.
#[cube]
pub fn convertible<E: Float>(value: f32) -> f32 {
    if is_bfloat16::<E>() {
        nearest_bfloat16(value)
    } else {
        value
    }
}

#[cube]
fn is_bfloat16<E: Float>() -> comptime_type!(bool) {
    let element = elem_type_of::<E>();
    comptime!(element == ElemType::Float(FloatKind::BF16))
}

/// Returns the nearest bf16 number as an f32 whose lower 16 bits are zero. A carry out of the mantissa increments the
/// exponent, so the largest numbers round to infinity.
#[cube]
pub fn nearest_bfloat16(value: f32) -> f32 {
    let bits = u32::reinterpret(value);
    let is_nan = (bits & 0x7fff_ffffu32) > 0x7f80_0000u32;
    let to_nearest = bits + 0x7fffu32 + ((bits >> 16u32) & 1u32);
    // Make a NaN quiet before the lower 16 bits are cleared. Otherwise a NaN with mantissa bits only among the lower 16
    // would become infinity.
    let kept = select(is_nan, bits | 0x0040_0000u32, to_nearest);
    f32::reinterpret(kept & 0xffff_0000u32)
}

/// Returns the nearest f16 number as an f32, with ties to even.
#[cube]
pub fn nearest_float16(value: f32) -> f32 {
    let bits = u32::reinterpret(value);
    let magnitude = bits & 0x7fff_ffffu32;
    // If the f16 result is subnormal, round to multiples of 2⁻²⁴ with integer operations. With float operations, the
    // rounding would add a large number and subtract it again, and compilers would remove both operations.
    let fraction = (magnitude & 0x007f_ffffu32) | 0x0080_0000u32;
    let shift = 126u32 - clamp(magnitude >> 23u32, 101u32, 112u32);
    let multiples = fraction >> shift;
    let rest = fraction - (multiples << shift);
    let half = 1u32 << (shift - 1u32);
    let is_up = rest > half || (rest == half && multiples % 2u32 == 1u32);
    let small = f32::cast_from(multiples + select(is_up, 1u32, 0u32)) * 5.960_464_5e-8f32;
    let to_nearest = (magnitude + 0x0fffu32 + ((magnitude >> 13u32) & 1u32)) & 0xffff_e000u32;
    let bounded = select(to_nearest >= 0x4780_0000u32, 0x7f80_0000u32, to_nearest);
    let numbers = select(magnitude < 0x3880_0000u32, u32::reinterpret(small), bounded);
    let rounded = select(magnitude > 0x7f80_0000u32, 0x7fc0_0000u32, numbers);
    f32::reinterpret(rounded | (bits & 0x8000_0000u32))
}
