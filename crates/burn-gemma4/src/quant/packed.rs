//! The packed format of compressed-tensors. Each row of a matrix has 4-bit or 8-bit codes in 32-bit words, and one
//! scale per group of columns. A matrix may also have zero points, one per group. A 32-bit word of zero points belongs
//! to one group of columns, and holds the zero points of consecutive rows.

use super::layout::Rounding;
use burn::tensor::{DType, bf16, f16};

/// The scheme by which a matrix is packed: the code width, the group size and the use of zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    /// The number of bits per code: 4 or 8.
    pub bits: usize,
    /// The number of columns that share a scale, or `None` if all columns of a row share one scale.
    pub group: Option<usize>,
    /// True if the matrix has no zero points.
    pub is_symmetric: bool,
}

/// The number of bits per word.
const WORD: usize = 32;

impl Scheme {
    /// Returns the number of words that hold `numbers` codes.
    pub fn words(&self, numbers: usize) -> usize {
        (numbers * self.bits).div_ceil(WORD)
    }

    /// Returns the number of scales per row, or `None` if the columns do not form whole groups.
    pub fn groups(&self, columns: usize) -> Option<usize> {
        match self.group {
            None => Some(1),
            Some(group) => columns.is_multiple_of(group).then(|| columns / group),
        }
    }

    /// Returns the offset that packing adds to a signed code, so that the stored code is not negative.
    fn offset(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// Quantizes a row. Returns true if all elements and all scales are finite. The scales are written in `dtype`.
    /// Groups must fill whole words, and the scheme must be symmetric.
    ///
    /// As in compressed-tensors, the largest absolute element of a group maps to half the range of codes: 7.5 for 4
    /// bits, 127.5 for 8 bits. Each element gets the nearest code, with ties to even.
    pub fn pack(&self, numbers: &[f32], dtype: DType, scales: &mut [u8], words: &mut [u8]) -> bool {
        let group = self.group.unwrap_or(numbers.len());
        let (most, range) = ((self.offset() - 1) as f32, self.offset() as f32 - 0.5);
        let mut are_numbers = true;
        let of_groups = scales.chunks_exact_mut(dtype.size());
        let of_groups = of_groups.zip(words.chunks_exact_mut(group * self.bits / 8));
        for (numbers, (scale_bytes, words)) in numbers.chunks_exact(group).zip(of_groups) {
            let largest = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
            let scale = match rounded(largest / range, dtype) {
                0.0 => smallest_scale(dtype),
                scale => scale,
            };
            are_numbers &= scale.is_finite() && numbers.iter().all(|number| number.is_finite());
            write_float(scale, dtype, scale_bytes);
            let code = |number: &f32| {
                let code = (number / scale).clamp(-most - 1.0, most).round_ties_even();
                (code as i32 + self.offset()) as u8
            };
            match self.bits {
                4 => {
                    for (byte, pair) in words.iter_mut().zip(numbers.chunks_exact(2)) {
                        *byte = code(&pair[0]) | code(&pair[1]) << 4;
                    }
                }
                _ => {
                    for (byte, number) in words.iter_mut().zip(numbers) {
                        *byte = code(number);
                    }
                }
            }
        }
        are_numbers
    }
}

/// Rounds an element to `dtype`.
pub(super) fn rounded(number: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(number).to_f32(),
        DType::BF16 => bf16::from_f32(number).to_f32(),
        _ => number,
    }
}

/// Returns the rounding of elements to `dtype`.
pub(super) fn rounding(dtype: DType) -> Rounding {
    match dtype {
        DType::F16 => Rounding::F16,
        DType::BF16 => Rounding::BF16,
        _ => Rounding::None,
    }
}

/// Returns the scale that compressed-tensors uses in place of zero: the distance from 1 to the next larger value of
/// `dtype`.
fn smallest_scale(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::EPSILON.to_f32(),
        DType::BF16 => bf16::EPSILON.to_f32(),
        _ => f32::EPSILON,
    }
}

fn write_float(number: f32, dtype: DType, bytes: &mut [u8]) {
    match dtype {
        DType::F16 => bytes.copy_from_slice(&f16::from_f32(number).to_le_bytes()),
        DType::BF16 => bytes.copy_from_slice(&bf16::from_f32(number).to_le_bytes()),
        _ => bytes.copy_from_slice(&number.to_le_bytes()),
    }
}

/// A packed matrix. The lengths of the byte slices match the scheme, the rows and the columns.
pub(crate) struct Packed<'a> {
    pub scheme: Scheme,
    pub rows: usize,
    pub columns: usize,
    /// The codes, `[rows, words(columns)]`.
    pub words: &'a [u8],
    /// The scales, `[rows, groups(columns)]`, in `dtype`, which is also the dtype that the matrix had before it was
    /// packed.
    pub scales: &'a [u8],
    pub dtype: DType,
    /// The zero points, `[words(rows), groups(columns)]`, or `None` if the scheme is symmetric.
    pub zero_points: Option<&'a [u8]>,
}

impl Packed<'_> {
    /// Dequantizes a row. As in compressed-tensors, `code - zero point` and its product with the scale are each rounded
    /// to the scales' dtype.
    pub fn dequantize(&self, row: usize, values: &mut [f32]) {
        let groups = self.scales.len() / self.dtype.size() / self.rows;
        let words = self.words.len() / self.rows;
        let words = &self.words[row * words..][..words];
        let columns = self.columns / groups;
        for (group, values) in values.chunks_exact_mut(columns).enumerate() {
            let scale = self.scale(row * groups + group);
            let zero_point = i32::from(self.packed_zero_point(row, group, groups));
            let number = |packed: i32| {
                let above_zero = packed - zero_point;
                rounded(rounded(above_zero as f32, self.dtype) * scale, self.dtype)
            };
            let first = group * columns;
            match self.scheme.bits {
                // Dequantize all 16 possible 4-bit codes once per group. For each column, a table lookup is then
                // cheaper than dequantizing the code.
                4 => {
                    let numbers: [f32; 16] = std::array::from_fn(|packed| number(packed as i32));
                    for (column, value) in (first..).zip(values) {
                        *value = numbers[usize::from(words[column / 2] >> (column % 2 * 4) & 15)];
                    }
                }
                _ => {
                    for (packed, value) in words[first..].iter().zip(values) {
                        *value = number(i32::from(*packed));
                    }
                }
            }
        }
    }

    /// Returns the zero point of a group, including the offset that packing adds to every code.
    pub(super) fn packed_zero_point(&self, row: usize, group: usize, groups: usize) -> u8 {
        let Some(zero_points) = self.zero_points else {
            return self.scheme.offset() as u8;
        };
        let bits = self.scheme.bits;
        let (word, shift) = (row * bits / WORD, row * bits % WORD);
        // Read a single byte, because a zero point has 4 or 8 bits and never crosses a byte boundary.
        let byte = zero_points[(word * groups + group) * (WORD / 8) + shift / 8];
        byte >> (shift % 8) & (u8::MAX >> (8 - bits))
    }

    pub(super) fn scale(&self, index: usize) -> f32 {
        read_float(self.scales, index, self.dtype)
    }
}

/// Reads the element `index` of a tensor in `dtype`, which is f32, f16 or bf16.
pub(crate) fn read_float(bytes: &[u8], index: usize, dtype: DType) -> f32 {
    let bytes = &bytes[index * dtype.size()..];
    match dtype {
        DType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        DType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks dequantization of a matrix whose codes and zero points do not fill their last words. A row has 6 codes,
    /// and a word has room for 8. The zero points of 9 rows fill one word and an eighth of the next.
    #[test]
    fn dequantize_with_partial_words_reads_zero_points_along_rows() {
        let scheme = Scheme {
            bits: 4,
            group: Some(3),
            is_symmetric: false,
        };
        let (rows, columns) = (9, 6);
        assert_eq!((scheme.words(columns), scheme.words(rows)), (1, 2));
        assert_eq!((scheme.groups(columns), scheme.groups(7)), (Some(2), None));
        let q = |row: usize, column: usize| (row + 2 * column) % 16;
        let zero = |row: usize, group: usize| (3 * row + group) % 16;
        let pack = |numbers: Vec<usize>| -> u32 {
            let numbers = numbers.into_iter().enumerate();
            numbers
                .map(|(index, number)| (number as u32) << (4 * index))
                .sum()
        };
        let words: Vec<u8> = (0..rows)
            .flat_map(|row| pack((0..columns).map(|column| q(row, column)).collect()).to_le_bytes())
            .collect();
        let zero_points: Vec<u8> = [0..8, 8..9]
            .into_iter()
            .flat_map(|rows| [(0, rows.clone()), (1, rows)])
            .flat_map(|(group, rows)| {
                pack(rows.map(|row| zero(row, group)).collect()).to_le_bytes()
            })
            .collect();
        let scales: Vec<f32> = (0..rows * 2).map(|index| 0.5 + index as f32).collect();
        let scale_bytes: Vec<u8> = scales
            .iter()
            .flat_map(|scale| scale.to_le_bytes())
            .collect();
        let packed = Packed {
            scheme,
            rows,
            columns,
            words: &words,
            scales: &scale_bytes,
            dtype: DType::F32,
            zero_points: Some(&zero_points),
        };
        let number = |row: usize, column: usize| {
            let difference = q(row, column) as f32 - zero(row, column / 3) as f32;
            difference * scales[2 * row + column / 3]
        };
        for row in 0..rows {
            let mut found = vec![0.0; columns];
            packed.dequantize(row, &mut found);
            let expected: Vec<f32> = (0..columns).map(|column| number(row, column)).collect();
            assert_eq!(found, expected, "row {row}");
        }
    }
}
