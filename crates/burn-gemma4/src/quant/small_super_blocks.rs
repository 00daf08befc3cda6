//! ggml's K formats of 2 and 3 bits. A block has 256 elements in 16 groups of 16 elements.
//!
//! Both formats store the lower 2 bits of the codes in the same order. Each half of a block has 128 elements in 32
//! bytes, and each byte has the codes of 4 elements, which are 32 elements apart.

use super::blocks::half;

/// The number of elements per group.
const GROUP: usize = 16;

/// Returns the lower 2 bits of the code of element `index`. `bytes` are the 64 bytes with these bits.
fn two_bits(bytes: &[u8], index: usize) -> u8 {
    let (half, at) = (index / 128, index % 128);
    bytes[half * 32 + at % 32] >> (at / 32 * 2) & 3
}

/// Returns all codes of a Q2_K block, in the order of the elements.
pub(super) fn q2_k_codes(block: &[u8]) -> impl Iterator<Item = u8> + '_ {
    (0..256).map(|index| two_bits(&block[16..80], index))
}

/// Dequantizes each code `q` to `scale · q - least`. A byte per group holds the group's scale in its low 4 bits and the
/// group's minimum in its high 4 bits. Two f16 at the end of the block multiply them.
pub(super) fn q2_k(block: &[u8], values: &mut [f32]) {
    let (scale, least) = (half(&block[80..]), half(&block[82..]));
    let mut codes = q2_k_codes(block);
    for (part, values) in block.iter().zip(values.chunks_exact_mut(GROUP)) {
        let scale = scale * f32::from(part & 15);
        let least = least * f32::from(part >> 4);
        for (value, q) in values.iter_mut().zip(codes.by_ref()) {
            *value = scale * f32::from(q) - least;
        }
    }
}

/// The zero point of the 3-bit codes.
pub(super) const Q3_K_ZERO: u8 = 4;

/// Returns all codes of a Q3_K block, in the order of the elements. Bit `index / 32` of byte `index % 32` of the block
/// is the upper bit of a code.
pub(super) fn q3_k_codes(block: &[u8]) -> impl Iterator<Item = u8> + '_ {
    (0..256).map(|index| {
        let top = block[index % 32] >> (index / 32) & 1;
        two_bits(&block[32..96], index) | top << 2
    })
}

/// Returns the scale of each group of a Q3_K block, an integer of 6 bits from -32 to 31. The first 8 of 12 bytes hold
/// the lower 4 bits: of groups 0 to 7 in their low halves, of groups 8 to 15 in their high halves. The last 4 bytes
/// hold the upper 2 bits, of groups that are 4 groups apart.
pub(super) fn q3_k_scales(block: &[u8]) -> [i8; 16] {
    let packed = &block[96..108];
    std::array::from_fn(|group| {
        let low = packed[group % 8] >> (group / 8 * 4) & 15;
        let top = packed[8 + group % 4] >> (group / 4 * 2) & 3;
        (low | top << 4) as i8 - 32
    })
}

pub(super) fn q3_k(block: &[u8], values: &mut [f32]) {
    let scale = half(&block[108..]);
    let mut codes = q3_k_codes(block);
    for (factor, values) in q3_k_scales(block)
        .into_iter()
        .zip(values.chunks_exact_mut(GROUP))
    {
        let scale = scale * f32::from(factor);
        for (value, q) in values.iter_mut().zip(codes.by_ref()) {
            *value = scale * f32::from(q as i8 - Q3_K_ZERO as i8);
        }
    }
}
