//! ggml's K formats. A block has 256 elements in groups. Each group has a scale of 6 or 8 bits, which is multiplied by
//! the block's f16 scale.

use super::blocks::half;

/// The number of elements per group in the formats that store a minimum per group.
const GROUP: usize = 32;

/// Returns the 6-bit scale and the 6-bit minimum of each of the 8 groups. `packed` has 12 bytes:
///
/// - bytes 0 to 3: the scales of groups 0 to 3 in the lower 6 bits
/// - bytes 4 to 7: the minimums of groups 0 to 3 in the lower 6 bits
/// - bytes 8 to 11: the lower 4 bits of the scales of groups 4 to 7 in the low half of each byte, and the lower 4 bits
///   of the minimums of groups 4 to 7 in the high half
///
/// The upper 2 bits of bytes 0 to 3 are the upper bits of the scales of groups 4 to 7. The upper 2 bits of bytes 4 to 7
/// are the upper bits of the minimums of groups 4 to 7.
pub(super) fn scales_and_least(packed: &[u8]) -> [(u8, u8); 8] {
    std::array::from_fn(|group| match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => {
            let (scale_top, least_top) = (packed[group - 4] >> 6, packed[group] >> 6);
            let low = packed[group + 4];
            (low & 15 | scale_top << 4, low >> 4 | least_top << 4)
        }
    })
}

/// Dequantizes each code `q` to `scale · q - least`, with the scale and the minimum (`least`) of the code's group. A
/// code has 4 bits, or 5 bits if `fifth` is given. Each 32 bytes of `nibbles` hold two groups: the first in the low 4
/// bits of each byte, the second in the high 4 bits. Bit `g` of byte `i` of `fifth` is the fifth bit of element `i` of
/// group `g`.
fn groups(header: &[u8], fifth: Option<&[u8]>, nibbles: &[u8], values: &mut [f32]) {
    let (scale, least) = (half(header), half(&header[2..]));
    let parts = scales_and_least(&header[4..16]);
    for (group, (part, values)) in parts
        .into_iter()
        .zip(values.chunks_exact_mut(GROUP))
        .enumerate()
    {
        let scale = scale * f32::from(part.0);
        let least = least * f32::from(part.1);
        for (index, value) in values.iter_mut().enumerate() {
            let q = code(fifth, nibbles, group, index);
            *value = scale * f32::from(q) - least;
        }
    }
}

/// Returns the code of one element.
fn code(fifth: Option<&[u8]>, nibbles: &[u8], group: usize, index: usize) -> u8 {
    let low = nibbles[group / 2 * GROUP + index] >> (group % 2 * 4) & 15;
    low | fifth.map_or(0, |fifth| fifth[index] >> group & 1) << 4
}

/// Returns all codes in a block, in the order of the elements.
pub(super) fn codes<'a>(
    fifth: Option<&'a [u8]>,
    nibbles: &'a [u8],
) -> impl Iterator<Item = u8> + 'a {
    (0..2 * nibbles.len()).map(move |at| code(fifth, nibbles, at / GROUP, at % GROUP))
}

pub(super) fn q4_k(block: &[u8], values: &mut [f32]) {
    groups(&block[..16], None, &block[16..], values);
}

pub(super) fn q5_k(block: &[u8], values: &mut [f32]) {
    groups(&block[..16], Some(&block[16..48]), &block[48..], values);
}

/// Dequantizes 16 groups of 16 elements with 6-bit codes. Each half of a block has 128 elements. For each half, 64
/// bytes hold the lower 4 bits of the codes, and 32 bytes hold the upper 2 bits.
pub(super) fn q6_k(block: &[u8], values: &mut [f32]) {
    let (codes, rest) = block.split_at(128 + 64);
    let (scales, scale) = rest.split_at(16);
    let scale = half(scale);
    for (group, values) in values.chunks_exact_mut(16).enumerate() {
        let scale = scale * f32::from(scales[group] as i8);
        for (index, value) in values.iter_mut().enumerate() {
            *value = scale * f32::from(six_bits(codes, group * 16 + index) as i8 - 32);
        }
    }
}

/// Returns the 6-bit code of one element. The zero point of these codes is 32.
pub(super) fn six_bits(codes: &[u8], index: usize) -> u8 {
    let (low, high) = codes.split_at(128);
    let (half, at) = (index / 128, index % 128);
    let low = low[half * 64 + at % 64] >> (at / 64 * 4) & 15;
    let high = high[half * 32 + at % 32] >> (at / 32 * 2) & 3;
    low | high << 4
}
