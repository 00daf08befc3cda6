//! The codes of e4m3 (OCP FP8 E4M3, e4m3fn), and the numbers that they represent.
//!
//! A code is a sign bit, 4 exponent bits with bias 7, and 3 mantissa bits. Codes 0 to 7 represent the multiples of 2⁻⁹
//! below 2⁻⁶ (zero and the subnormal numbers). The largest number is 448. The two NaN codes count as ±480.

use super::quantized::packed;
use super::tensors::{bool_dtype, cast};
use crate::types::quantized::{CODES, LARGEST_E4M3};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, IntDType, Shape, TensorData};

/// The number 2²³. Adding this number to a float from 0 to 2²³ rounds the float to a whole number, with ties to even.
const WHOLE: f32 = 8_388_608.0;

/// Converts rows, `[batch, heads, length, columns]`, to words of four e4m3 codes each. The codes represent
/// `rows / scales`. `scales` is `[batch, heads, length]`.
pub(crate) fn e4m3_words<B: Backend>(rows: FloatTensor<B>, scales: FloatTensor<B>) -> IntTensor<B> {
    let shape = rows.shape();
    let [batch, heads, length, columns] = [shape[0], shape[1], shape[2], shape[3]];
    if batch * heads * length == 0 {
        let words = Shape::new([batch, heads, length, columns / CODES]);
        return B::int_zeros(words, &rows.device(), IntDType::I32);
    }
    let scales = B::float_reshape(scales, Shape::new([batch, heads, length, 1]));
    let rows = B::float_div(cast::<B>(rows, DType::F32), scales);
    packed::<B>(codes::<B>(rows))
}

/// Rounds each number to the nearest e4m3 number, and returns the code of the e4m3 number as a signed byte from −128 to
/// 127. Ties go to the even code.
fn codes<B: Backend>(numbers: FloatTensor<B>) -> IntTensor<B> {
    let bools = bool_dtype::<B>(&numbers);
    let is_nan = B::float_is_nan(numbers.clone(), bools);
    let is_negative = B::float_lower_elem(numbers.clone(), 0.0.into(), bools);
    let magnitudes = B::float_abs(B::float_mask_fill(numbers, is_nan.clone(), 0.0.into()));
    let magnitudes = B::float_clamp_max(magnitudes, LARGEST_E4M3.into());
    // A code is `base` plus the rounded product of the magnitude and `units`. `base` and `units` depend on the largest
    // power of two that is not above the magnitude.
    let mut units = B::float_add_scalar(
        B::float_mul_scalar(magnitudes.clone(), 0.0.into()),
        512.0.into(),
    );
    let mut base = B::float_mul_scalar(magnitudes.clone(), 0.0.into());
    for exponent in -5..=8 {
        let power = f64::from(exponent).exp2();
        let is_above = B::float_greater_equal_elem(magnitudes.clone(), power.into(), bools);
        units = B::float_mask_fill(units, is_above.clone(), (8.0 / power).into());
        base = B::float_mask_fill(base, is_above, f64::from(8 * (exponent + 6)).into());
    }
    let units = B::float_mul(magnitudes, units);
    let units = B::float_sub_scalar(B::float_add_scalar(units, WHOLE.into()), WHOLE.into());
    let codes = B::float_into_int(B::float_add(base, units), IntDType::I32);
    let codes = B::int_mask_fill(codes, is_nan, 127i32.into());
    // The codes computed so far are from 0 to 127. For negative numbers, subtract 128, which sets the sign bit of a
    // byte in two's complement.
    let signed = B::int_sub_scalar(codes.clone(), 128i32.into());
    B::int_mask_where(codes, is_negative, signed)
}

/// Returns the number that each code represents, in `dtype`.
pub(super) fn numbers<B: Backend>(codes: IntTensor<B>, dtype: DType) -> FloatTensor<B> {
    let table: Vec<f32> = (0..=255).map(number_of).collect();
    let table = B::float_from_data(TensorData::new(table, [256]), &codes.device());
    let shape = codes.shape();
    let codes = B::int_reshape(codes, Shape::new([shape.num_elements()]));
    let numbers = B::float_select(cast::<B>(table, dtype), 0, codes);
    B::float_reshape(numbers, shape)
}

/// Returns the number that a code represents.
fn number_of(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 512.0,
        exponent => (8.0 + mantissa) * f32::exp2((exponent - 10) as f32),
    };
    match code & 128 {
        0 => magnitude,
        _ => -magnitude,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::tensor::Device;
    use burn::backend::{Flex, ops::FloatTensorOps, ops::IntTensorOps, read_sync};

    fn codes_of(numbers: &[f32]) -> Vec<i32> {
        let data = TensorData::new(numbers.to_vec(), [1, 1, 1, numbers.len()]);
        let codes = codes::<Flex>(Flex::float_from_data(data, &Device::<Flex>::default()));
        let data = read_sync(Flex::int_into_data(codes)).expect("the tensor can be read");
        data.iter::<i32>().collect()
    }

    #[test]
    fn codes_of_each_number_give_its_code() {
        for code in 0..=255u8 {
            // Skip the NaN codes, because they count as ±480, which exceeds the largest number. Skip the code 128,
            // which represents −0, because `codes` converts −0 to the code 0.
            if code & 127 != 127 && code != 128 {
                let found = codes_of(&[number_of(code)])[0];
                assert_eq!(found as u8, code, "{}", number_of(code));
            }
        }
    }

    #[test]
    fn codes_between_two_numbers_are_the_nearest_or_even() {
        for code in 0..126u8 {
            let [low, high] = [code, code + 1].map(number_of);
            let middle = (low + high) / 2.0;
            let even = i32::from(code + code % 2);
            let found = codes_of(&[middle.next_down(), middle, middle.next_up()]);
            assert_eq!(
                found,
                [i32::from(code), even, i32::from(code) + 1],
                "{middle}"
            );
        }
    }

    #[test]
    fn codes_beyond_the_largest_number_are_clamped() {
        let found = codes_of(&[449.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
        assert_eq!(found, [126, 126, 126 - 128, 127]);
    }
}
