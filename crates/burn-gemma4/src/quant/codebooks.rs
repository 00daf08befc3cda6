//! ggml's formats of 4-bit codes that stand for the numbers of a codebook.

use super::blocks::{half, nibbles};
use super::layout::Codebook;

/// The number of elements per group. A group has 16 bytes of codes, first the low halves of all bytes.
const GROUP: usize = 32;

/// Returns the codebook's number of each code in `bytes`, which hold one group.
fn numbers(codebook: Codebook, bytes: &[u8]) -> impl Iterator<Item = f32> {
    let integers = codebook.integers();
    nibbles(bytes).map(move |code| f32::from(integers[usize::from(code)]))
}

pub(super) fn iq4_nl(block: &[u8], values: &mut [f32]) {
    let scale = half(block);
    for (value, number) in values.iter_mut().zip(numbers(Codebook::Iq4, &block[2..])) {
        *value = scale * number;
    }
}

/// Returns the scale of each group of an IQ4_XS block, an integer of 6 bits from -32 to 31. Bytes 4 to 7 hold the lower
/// 4 bits, two groups a byte. Bytes 2 and 3 hold the upper 2 bits, four groups a byte.
pub(super) fn iq4_xs_scales(block: &[u8]) -> [i8; 8] {
    std::array::from_fn(|group| {
        let low = block[4 + group / 2] >> (group % 2 * 4) & 15;
        let top = block[2 + group / 4] >> (group % 4 * 2) & 3;
        (low | top << 4) as i8 - 32
    })
}

/// Returns all codes of an IQ4_XS block, in the order of the elements.
pub(super) fn iq4_xs_codes(block: &[u8]) -> impl Iterator<Item = u8> + '_ {
    block[8..].chunks_exact(GROUP / 2).flat_map(nibbles)
}

pub(super) fn iq4_xs(block: &[u8], values: &mut [f32]) {
    let scale = half(block);
    let groups = block[8..]
        .chunks_exact(GROUP / 2)
        .zip(values.chunks_exact_mut(GROUP));
    for (factor, (bytes, values)) in iq4_xs_scales(block).into_iter().zip(groups) {
        let scale = scale * f32::from(factor);
        for (value, number) in values.iter_mut().zip(numbers(Codebook::Iq4, bytes)) {
            *value = scale * number;
        }
    }
}

/// Returns the scale of an MXFP4 block for numbers of [`Codebook::E2m1`], which are twice the stored floats. The scale
/// is half the power of two whose biased exponent is the block's first byte.
pub(super) fn mxfp4_scale(block: &[u8]) -> f32 {
    let exponent = u32::from(block[0]);
    f32::from_bits(match exponent {
        // These scales are subnormal.
        0 | 1 => 0x20_0000 << exponent,
        _ => (exponent - 1) << 23,
    })
}

/// Returns all codes of an MXFP4 block, in the order of the elements. ggml reads code 8, which is -0, as 0. The
/// function therefore returns 0 in place of 8.
pub(super) fn mxfp4_codes(block: &[u8]) -> impl Iterator<Item = u8> + '_ {
    nibbles(&block[1..]).map(|code| if code == 8 { 0 } else { code })
}

pub(super) fn mxfp4(block: &[u8], values: &mut [f32]) {
    let scale = mxfp4_scale(block);
    for (value, number) in values.iter_mut().zip(numbers(Codebook::E2m1, &block[1..])) {
        *value = scale * number;
    }
}
