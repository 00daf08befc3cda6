//! Quantization of rows to 8-bit codes. Tests compare the kernels with this module, and devices without kernels run it.

use super::e4m3;
pub(crate) use super::e4m3::e4m3_words;
use super::tensors::{bool_dtype, cast};
use crate::types::quantized::{CODES, CodeFormat, LARGEST, ZERO_BELOW};
use crate::types::tensors::QuantizedTensors;
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, IntDType, Shape, Slice};

/// Quantizes rows as [`QuantizedRows::new`](crate::types::quantized::QuantizedRows::new) describes.
pub(crate) fn quantize<B: Backend>(rows: FloatTensor<B>) -> QuantizedTensors<B> {
    let rows = cast::<B>(rows, DType::F32);
    let shape = rows.shape();
    let [batch, heads, length, columns] = [shape[0], shape[1], shape[2], shape[3]];
    let scales_shape = Shape::new([batch, heads, length]);
    if batch * heads * length == 0 {
        let device = rows.device();
        return QuantizedTensors {
            words: B::int_zeros(
                Shape::new([batch, heads, length, columns / CODES]),
                &device,
                IntDType::I32,
            ),
            scales: B::float_zeros(scales_shape, &device, FloatDType::F32),
        };
    }
    let bools = bool_dtype::<B>(&rows);
    // `flaw` is NaN if the row contains NaN or infinity, and 0 otherwise. The largest magnitude does not reveal a NaN,
    // because `max` may skip NaN.
    let flaw = B::float_sum_dim(B::float_mul_scalar(rows.clone(), 0.0.into()), 3);
    let largest = B::float_max_dim(B::float_abs(rows.clone()), 3);
    let least = f32::from_bits(ZERO_BELOW);
    let is_zero = B::float_lower_elem(largest.clone(), least.into(), bools);
    let scales = B::float_div_scalar(largest, LARGEST.into());
    let divisors = B::float_mask_fill(scales.clone(), is_zero.clone(), f32::MAX.into());
    let scales = B::float_add(B::float_mask_fill(scales, is_zero, 0.0.into()), flaw);

    let multiples = B::float_div(rows, divisors);
    // Rounds ties up by `floor(x + 0.5)`, because devices differ in how `round` treats ties.
    let codes = B::float_floor(B::float_add_scalar(multiples, 0.5.into()));
    let codes = B::float_clamp(codes, (-LARGEST).into(), LARGEST.into());
    let codes = B::float_into_int(codes, IntDType::I32);
    let words = packed::<B>(codes);
    QuantizedTensors {
        words,
        scales: B::float_reshape(scales, scales_shape),
    }
}

/// Packs signed 8-bit codes, `[batch, heads, length, columns]`, into words of four codes.
pub(super) fn packed<B: Backend>(codes: IntTensor<B>) -> IntTensor<B> {
    let shape = codes.shape();
    let [batch, heads, length, columns] = [shape[0], shape[1], shape[2], shape[3]];
    let words = [batch, heads, length, columns / CODES];
    let [a, b, c, d] = words;
    let codes = B::int_reshape(codes, Shape::new([a, b, c, d, CODES]));
    let code = |lane: usize| {
        let [a, b, c, d] = words.map(|size| Slice::from(0..size));
        let code = B::int_slice(codes.clone(), &[a, b, c, d, (lane..lane + 1).into()]);
        B::int_reshape(code, Shape::new(words))
    };
    // The code in the highest byte keeps its sign. The lower codes are masked to 8 bits, because their sign extension
    // would change the higher bytes.
    let highest = CODES - 1;
    (0..highest).fold(
        B::int_mul_scalar(code(highest), (1i32 << (8 * highest)).into()),
        |words, lane| {
            let byte = B::bitwise_and_scalar(code(lane), 255i32.into());
            B::int_add(words, B::int_mul_scalar(byte, (1i32 << (8 * lane)).into()))
        },
    )
}

/// Multiplies the number that each code represents by the scale of its row, and returns the products in `dtype`. The
/// multiplication is done in f32, or in f64 if `dtype` is f64.
pub(crate) fn dequantize<B: Backend>(
    rows: QuantizedTensors<B>,
    format: CodeFormat,
    dtype: DType,
) -> FloatTensor<B> {
    let QuantizedTensors { words, scales } = rows;
    let compute = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let shape = words.shape();
    let [batch, heads, length, count] = [shape[0], shape[1], shape[2], shape[3]];
    let rows = Shape::new([batch, heads, length, count * CODES]);
    if batch * heads * length == 0 {
        return B::float_zeros(rows, &words.device(), dtype.into());
    }
    let bytes = (0..CODES)
        .map(|lane| {
            let byte = byte::<B>(words.clone(), lane);
            B::int_reshape(byte, Shape::new([batch, heads, length, count, 1]))
        })
        .collect();
    let bytes = B::int_reshape(B::int_cat(bytes, 4), rows);
    let codes = match format {
        CodeFormat::Int8 => int8_numbers::<B>(bytes, compute.into()),
        CodeFormat::E4m3 => e4m3::numbers::<B>(bytes, compute),
    };
    let scales = B::float_reshape(scales, Shape::new([batch, heads, length, 1]));
    cast::<B>(B::float_mul(codes, cast::<B>(scales, compute)), dtype)
}

/// Interprets bytes as int8 codes, and returns the codes as floats.
fn int8_numbers<B: Backend>(bytes: IntTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    // The bytes are from 0 to 255. Adding 128 modulo 256 maps the codes −128 to 127 to the numbers 0 to 255, in this
    // order. The later subtraction of 128 gives the signed codes.
    let raised = B::int_add_scalar(bytes, 128i32.into());
    let raised = B::bitwise_and_scalar(raised, 255i32.into());
    B::float_sub_scalar(B::int_into_float(raised, dtype), 128.0.into())
}

/// Returns the byte at index `lane` of each word, from 0 to 255.
fn byte<B: Backend>(words: IntTensor<B>, lane: usize) -> IntTensor<B> {
    let shifted = match lane {
        0 => words,
        lane => B::bitwise_right_shift_scalar(words, (8 * lane as i32).into()),
    };
    B::bitwise_and_scalar(shifted, 255i32.into())
}
