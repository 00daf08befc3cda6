//! ggml's K formats: blocks of 256 numbers in groups, whose scales are numbers of 6 or 8 bits under one scale in f16.

use super::blocks::half;

/// Numbers of a group in formats with a smallest number.
const GROUP: usize = 32;

/// Scale and smallest number of each group, of 6 bits each: those of the first four groups whole, of the others 4 bits in the last
/// four bytes and 2 on top of the first ones'.
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

/// Groups of scale · q - least, where `q` are numbers of 4 bits and, if `fifth` has bytes, of a fifth one. Two groups share 32 bytes of
/// `nibbles`, and all groups the bytes of `fifth`.
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

/// The number before its scale.
fn code(fifth: Option<&[u8]>, nibbles: &[u8], group: usize, index: usize) -> u8 {
    let low = nibbles[group / 2 * GROUP + index] >> (group % 2 * 4) & 15;
    low | fifth.map_or(0, |fifth| fifth[index] >> group & 1) << 4
}

/// All of them.
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

/// 16 groups of 16 numbers of 6 bits, in two halves: 4 bits in 64 bytes for two quarters of a half each, 2 bits in 32 bytes for all four.
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

/// A number before its scale, 32 above it.
pub(super) fn six_bits(codes: &[u8], index: usize) -> u8 {
    let (low, high) = codes.split_at(128);
    let (half, at) = (index / 128, index % 128);
    let low = low[half * 64 + at % 64] >> (at / 64 * 4) & 15;
    let high = high[half * 32 + at % 32] >> (at / 32 * 2) & 3;
    low | high << 4
}
