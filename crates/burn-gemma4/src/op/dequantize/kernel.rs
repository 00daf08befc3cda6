//! Dequantization: `round((code - zero) · scale + least)`, where each group of codes has a zero point, a scale and a
//! minimum (`least`). A codebook's number may stand in place of `code - zero`. The results equal those of
//! [`Layout`](crate::quant::layout::Layout) on the host bit by bit.
//!
//! Budget: registers hold the dequantized values of one word, at most 8; no shared memory. Schedule: a unit reads one
//! word of codes and the parameters of the word's group, and writes adjacent values. Bound: memory bandwidth.
//!
//! GEMVs call the functions of this module to dequantize weights in registers.

use crate::quant::layout::{Codebook, Format, Rounding, SUPER, SUPER_WORDS, Scales};
use burn::tensor::f16;
use cube_kit::rounding::{nearest_bfloat16, nearest_float16, rounded};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// The layout of packed rows in 32-bit words: the row stride, and the offsets of the codes' upper bits and of the scales
/// within a row.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(in crate::op) struct RowParts {
    /// The distance from one row to the next, in words.
    pub stride: u32,
    /// The offset of the codes' upper bits from the start of the row, in words.
    pub top: u32,
    /// The offset of the scales from the start of the row, in words.
    pub scales: u32,
}

/// The parameters that dequantize the codes of a group.
#[derive(CubeType, Clone, Copy)]
pub(in crate::op) struct Group {
    /// The zero point of the group, or 0 if the format has no zero point per group.
    pub zero: f32,
    pub scale: f32,
    pub least: f32,
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn dequantize<E: Float, N: Size>(
    words: &Tensor<u32>,
    numbers: &mut Tensor<Vector<E, N>>,
    parts: RowParts,
    words_of_row: u32,
    all_words: usize,
    #[comptime] format: Format,
    #[comptime] converts_f16: bool,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    if ABSOLUTE_POS < all_words {
        let row = ABSOLUTE_POS / words_of_row as usize;
        let word = (ABSOLUTE_POS % words_of_row as usize) as u32;
        let start = row * parts.stride as usize;
        let codes = words[start + word as usize];
        let top = top_of_word(words, start + parts.top as usize, word, format);
        let column = word * comptime!(format.codes_of_word() as u32);
        let group = group_of_column(
            words,
            start + parts.scales as usize,
            column,
            format,
            converts_f16,
        );
        let width = numbers.vector_size().comptime();
        let vectors = comptime!(format.codes_of_word() / width);
        #[unroll]
        for vector in 0..vectors {
            let mut written = Vector::<E, N>::empty();
            #[unroll]
            for lane in 0..width {
                let code = code(codes, top, comptime!(vector * width + lane), format);
                let number = number(code, &group, format);
                written.insert(lane, element::<E>(number));
            }
            numbers[ABSOLUTE_POS * vectors + vector] = written;
        }
    }
}

/// Rounds an f32 to the nearest value of the element type. A driver's conversion to f16 may not round to the nearest
/// value.
#[cube]
fn element<E: Float>(number: f32) -> E {
    let element = elem_type_of::<E>();
    if comptime!(element == ElemType::Float(FloatKind::F16)) {
        E::cast_from(nearest_float16(number))
    } else {
        rounded::<E>(number)
    }
}

/// Returns the upper bits of the codes whose lower bits are in word `word` of the row. The upper bits of the first code
/// are the lowest bits of the result.
#[cube]
pub(in crate::op) fn top_of_word(
    words: &Tensor<u32>,
    top: usize,
    word: u32,
    #[comptime] format: Format,
) -> u32 {
    if comptime!(format.top_bits() > 0) {
        let bits = word * comptime!((format.top_bits() * format.codes_of_word()) as u32);
        words[top + (bits / 32u32) as usize] >> (bits % 32u32)
    } else {
        0u32.runtime()
    }
}

/// Returns a code of a word, minus the zero point that all codes of the format have in common. If the format has a
/// codebook, returns the codebook's number.
#[cube]
pub(in crate::op) fn code(
    word: u32,
    top: u32,
    #[comptime] index: usize,
    #[comptime] format: Format,
) -> f32 {
    let place = comptime!(CodePosition::of(index, format));
    if comptime!(format.codebook == Some(Codebook::Iq4)) {
        iq4((word >> comptime!((4 * index) as u32)) & 15u32)
    } else if comptime!(format.codebook == Some(Codebook::E2m1)) {
        e2m1((word >> comptime!((4 * index) as u32)) & 15u32)
    } else if comptime!(format.top_bits() > 0) {
        let low = (word >> comptime!((4 * index) as u32)) & 15u32;
        let above = top >> comptime!((format.top_bits() * index) as u32);
        let above = above & comptime!((1u32 << format.top_bits()) - 1);
        let bits = low | (above << 4u32) | comptime!(CodePosition::FIRST.exponent());
        f32::reinterpret(bits) - comptime!(CodePosition::FIRST.power() + format.zero() as f32)
    } else {
        let codes = word >> comptime!(place.shift);
        let bits = (codes & comptime!(place.mask)) | comptime!(place.exponent());
        f32::reinterpret(bits) - comptime!(place.power() + format.zero() as f32)
    }
}

/// Returns the number of [`Codebook::Iq4`]. Four words hold the 16 numbers as bytes, each plus 128.
#[cube]
fn iq4(code: u32) -> f32 {
    let low = select(
        code < 4u32,
        comptime!(iq4_word(0)).runtime(),
        comptime!(iq4_word(1)).runtime(),
    );
    let high = select(
        code < 12u32,
        comptime!(iq4_word(2)).runtime(),
        comptime!(iq4_word(3)).runtime(),
    );
    let byte = (select(code < 8u32, low, high) >> ((code & 3u32) * 8u32)) & 255u32;
    let bits = byte | comptime!(CodePosition::FIRST.exponent());
    f32::reinterpret(bits) - comptime!(CodePosition::FIRST.power() + 128.0)
}

/// Returns the numbers of codes `4 · index` to `4 · index + 3` of [`Codebook::Iq4`], each plus 128.
fn iq4_word(index: usize) -> u32 {
    let bytes = std::array::from_fn(|at| Codebook::Iq4.integers()[4 * index + at] as u8 ^ 128);
    u32::from_le_bytes(bytes)
}

/// Returns the number of [`Codebook::E2m1`]. The 8 absolute values fit into the 4-bit fields of one word.
#[cube]
fn e2m1(code: u32) -> f32 {
    let size = (comptime!(e2m1_sizes()).runtime() >> ((code & 7u32) * 4u32)) & 15u32;
    let size = f32::reinterpret(size | comptime!(CodePosition::FIRST.exponent()))
        - comptime!(CodePosition::FIRST.power());
    f32::reinterpret(u32::reinterpret(size) | ((code & 8u32) << 28u32))
}

/// Returns the absolute values of [`Codebook::E2m1`], 4 bits each.
fn e2m1_sizes() -> u32 {
    let sizes = Codebook::E2m1.integers().into_iter().take(8).enumerate();
    sizes.fold(0, |word, (index, size)| word | (size as u32) << (4 * index))
}

/// The position of a code within the mantissa of a float. To convert a code to a float, the kernel ORs the code into
/// the mantissa of a power of two. The kernel then subtracts this power of two, so no integer-to-float instruction is
/// needed.
#[derive(Clone, Copy)]
struct CodePosition {
    /// The number of bits by which the word is shifted right. The shift moves the code into the 23 bits of the
    /// mantissa.
    shift: u32,
    mask: u32,
    /// The index of the mantissa bit that holds the code's lowest bit.
    at: u32,
}

impl CodePosition {
    const FIRST: Self = Self {
        shift: 0,
        mask: 255,
        at: 0,
    };

    fn of(index: usize, format: Format) -> Self {
        let bits = format.low_bits();
        let shift = match ((index + 1) * bits <= 23, bits) {
            (true, _) => 0,
            (false, 4) => 12,
            (false, _) => 16,
        };
        let at = (index * bits - shift) as u32;
        Self {
            shift: shift as u32,
            mask: ((1 << bits) - 1) << at,
            at,
        }
    }

    fn power(self) -> f32 {
        (1u32 << (23 - self.at)) as f32
    }

    fn exponent(self) -> u32 {
        self.power().to_bits()
    }
}

/// Returns the parameters of the group that a column belongs to.
#[cube]
pub(in crate::op) fn group_of_column(
    words: &Tensor<u32>,
    scales: usize,
    column: u32,
    #[comptime] format: Format,
    #[comptime] converts_f16: bool,
) -> Group {
    let group = match comptime!(format.group) {
        Some(columns) => column / comptime!(columns as u32),
        None => 0u32.runtime(),
    };
    let mut found = Group {
        zero: 0.0f32,
        scale: 0.0f32,
        least: 0.0f32,
    };
    if comptime!(matches!(format.scales, Scales::Half { .. })) {
        let word = words[scales + (group / 2u32) as usize];
        found.scale = half(word >> (group % 2u32 * 16u32), converts_f16);
    } else if comptime!(format.scales == Scales::HalfAndLeast) {
        let word = words[scales + group as usize];
        found.scale = half(word, converts_f16);
        found.least = half(word >> 16u32, converts_f16);
    } else if comptime!(matches!(format.scales, Scales::Single { .. })) {
        found.scale = f32::reinterpret(words[scales + group as usize]);
    } else if comptime!(format.scales == Scales::SingleAndZero) {
        let at = scales + 2 * group as usize;
        found.scale = f32::reinterpret(words[at]);
        found.zero = f32::cast_from(words[at + 1]);
    } else if comptime!(matches!(format.scales, Scales::Bytes { .. })) {
        let groups = comptime!((SUPER / 16) as u32);
        let at = scales + (group / groups) as usize * SUPER_WORDS;
        let byte = byte_of(words, at + 1, group % groups);
        // Interpret the byte as a signed integer, because scales of this format may be negative.
        found.scale = half(words[at], converts_f16) * (f32::cast_from(byte ^ 128u32) - 128.0f32);
    } else if comptime!(format.scales == Scales::NibblesAndLeast) {
        let groups = comptime!((SUPER / 16) as u32);
        let at = scales + (group / groups) as usize * SUPER_WORDS;
        let byte = byte_of(words, at + 1, group % groups);
        found.scale = half(words[at], converts_f16) * f32::cast_from(byte & 15u32);
        let least = f32::cast_from(byte >> 4u32);
        found.least = -(half(words[at] >> 16u32, converts_f16) * least);
    } else {
        let groups = comptime!((SUPER / 32) as u32);
        let at = scales + (group / groups) as usize * SUPER_WORDS;
        let scale = f32::cast_from(byte_of(words, at + 1, group % groups));
        let least = f32::cast_from(byte_of(words, at + 3, group % groups));
        found.scale = half(words[at], converts_f16) * scale;
        found.least = -(half(words[at] >> 16u32, converts_f16) * least);
    }
    found
}

#[cube]
fn byte_of(words: &Tensor<u32>, first: usize, index: u32) -> u32 {
    (words[first + (index / 4u32) as usize] >> (index % 4u32 * 8u32)) & 255u32
}

/// Returns the dequantized value of a code.
#[cube]
pub(in crate::op) fn number(code: f32, group: &Group, #[comptime] format: Format) -> f32 {
    let mut number = of_zero(code, group, format) * group.scale;
    if comptime!(format.has_least()) {
        number += group.least;
    }
    if comptime!(format.rounding == Rounding::BF16) {
        number = nearest_bfloat16(number);
    } else if comptime!(format.rounding == Rounding::F16) {
        number = nearest_float16(number);
    }
    number
}

/// Returns a code minus the zero point of its group. Returns the code unchanged if the format has no zero point per group.
#[cube]
pub(in crate::op) fn of_zero(code: f32, group: &Group, #[comptime] format: Format) -> f32 {
    if comptime!(format.scales == Scales::SingleAndZero) {
        code - group.zero
    } else {
        code
    }
}

/// Converts the f16 in the lower 16 bits of `bits` to f32. If `converts_f16` is false, the function uses integer
/// operations, because some devices flush subnormal f16 values to zero.
#[cube]
fn half(bits: u32, #[comptime] converts_f16: bool) -> f32 {
    if converts_f16 {
        f32::cast_from(f16::reinterpret(u16::cast_from(bits & 0xffffu32)))
    } else {
        let exponent = bits & 0x7c00u32;
        let fraction = bits & 0x03ffu32;
        let number = ((exponent | fraction) << 13u32) + 0x3800_0000u32;
        // Give infinities and NaN the largest exponent of f32. An f16 is infinite or NaN if it has the largest exponent of
        // f16.
        let number = select(exponent == 0x7c00u32, number + 0x3800_0000u32, number);
        let small = f32::cast_from(fraction) * 5.960_464_5e-8f32;
        let number = select(exponent == 0u32, u32::reinterpret(small), number);
        f32::reinterpret(number | ((bits & 0x8000u32) << 16u32))
    }
}
