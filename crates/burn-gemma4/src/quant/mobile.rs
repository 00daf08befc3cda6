//! The matrices of Google's mobile checkpoints (`-qat-mobile-transformers`, `quant_method` "gemma"). Codes of 2, 4 or 8
//! bits stand in bytes, and a row or a group of its columns has an f32 scale.

use super::layout::{Format, Layout, Scales};
use super::pack::Row;
use super::packed::{read_float, rounded, rounding};
use burn::tensor::DType;

/// A matrix of codes. The lengths of the byte slices match the other fields.
pub(crate) struct Mobile<'a> {
    /// The number of bits per code: 2, 4 or 8.
    pub bits: usize,
    pub rows: usize,
    pub columns: usize,
    /// The number of scales per row, which divides the number of columns.
    pub groups: usize,
    /// The codes, `[rows, columns · bits / 8]`. A byte holds its first column in its lowest bits. Codes of 8 bits are
    /// signed. Shorter codes are unsigned, and half of their range stands for 0.
    pub codes: &'a [u8],
    /// The scales in f32, `[rows, groups]`.
    pub scales: &'a [u8],
    /// The dtype in which the model computes. Hugging Face Transformers rounds the scale and its product with a code to
    /// this dtype.
    pub dtype: DType,
}

impl Mobile<'_> {
    /// Returns the layout of the matrix's rows, or `None` if the kernels do not support such rows. The layout has no
    /// codes of 2 bits, so these are held as codes of 4 bits.
    pub fn layout(&self) -> Option<Layout> {
        let bits = self.bits.max(4);
        let format = Format {
            bits,
            group: (self.groups > 1).then(|| self.columns / self.groups),
            scales: Scales::Single {
                zero: 1 << (bits - 1),
            },
            codebook: None,
            rounding: rounding(self.dtype),
        };
        Layout::new(format, self.columns)
    }

    /// Packs a row into `words`, which must be all zero.
    pub fn pack(&self, layout: Layout, row: usize, words: &mut [u32]) {
        let zero = 1 << (layout.format.bits - 1);
        let codes: Vec<u8> = self
            .integers(row)
            .map(|code| (i32::from(code) + zero) as u8)
            .collect();
        let mut written = Row { layout, words };
        written.codes(0, &codes);
        for group in 0..self.groups {
            written.scales(group, &[self.scale(row, group, self.dtype).to_bits()]);
        }
    }

    /// Dequantizes a row for a model that computes in `dtype`.
    pub fn dequantize(&self, row: usize, dtype: DType, values: &mut [f32]) {
        let of_group = self.columns / self.groups;
        let mut codes = self.integers(row);
        for (group, values) in values.chunks_exact_mut(of_group).enumerate() {
            let scale = self.scale(row, group, dtype);
            for (value, code) in values.iter_mut().zip(&mut codes) {
                *value = rounded(f32::from(code) * scale, dtype);
            }
        }
    }

    /// Returns the signed codes of a row.
    fn integers(&self, row: usize) -> impl Iterator<Item = i8> {
        let (bits, per_byte) = (self.bits, 8 / self.bits);
        let of_row = self.columns / per_byte;
        let bytes = &self.codes[row * of_row..][..of_row];
        let integer = move |column: usize| match bits {
            8 => bytes[column] as i8,
            _ => {
                let code = bytes[column / per_byte] >> (column % per_byte * bits);
                (code & ((1 << bits) - 1)) as i8 - (1 << (bits - 1))
            }
        };
        (0..self.columns).map(integer)
    }

    fn scale(&self, row: usize, group: usize, dtype: DType) -> f32 {
        rounded(
            read_float(self.scales, row * self.groups + group, DType::F32),
            dtype,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the order and the sign of codes within a byte.
    #[test]
    fn dequantize_of_bytes_reads_low_bits_first() {
        let scales = [1f32, 10.0].map(f32::to_le_bytes).concat();
        for (bits, codes, expected) in [
            (2, vec![0b11_10_01_00], [-2.0, -1.0, 0.0, 10.0]),
            (4, vec![0x80, 0xf9], [-8.0, 0.0, 10.0, 70.0]),
            (
                8,
                vec![0x80, 0x7f, 0x01, 0xff],
                [-128.0, 127.0, 10.0, -10.0],
            ),
        ] {
            let matrix = Mobile {
                bits,
                rows: 1,
                columns: 4,
                groups: 2,
                codes: &codes,
                scales: &scales,
                dtype: DType::F32,
            };
            let mut found = [0.0; 4];
            matrix.dequantize(0, DType::F32, &mut found);
            assert_eq!(found, expected, "{bits} bits");
        }
    }

    /// Checks that packed words dequantize to the same bits as the matrix, for all widths, groups and dtypes.
    #[test]
    fn pack_of_mobile_rows_dequantizes_to_same_bits() {
        let (rows, columns) = (3, 64);
        let mut state = 7u32;
        let mut random = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (state >> 16) as u8
        };
        for bits in [2, 4, 8] {
            for groups in [1, 8] {
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    let codes: Vec<u8> = (0..rows * columns * bits / 8).map(|_| random()).collect();
                    let scales: Vec<u8> = (0..rows * groups)
                        .flat_map(|at| ((at as f32 + 0.3) / 77.0).to_le_bytes())
                        .collect();
                    let matrix = Mobile {
                        bits,
                        rows,
                        columns,
                        groups,
                        codes: &codes,
                        scales: &scales,
                        dtype,
                    };
                    let layout = matrix.layout().expect("the columns are whole groups");
                    for row in 0..rows {
                        let mut words = vec![0; layout.words()];
                        matrix.pack(layout, row, &mut words);
                        let (mut found, mut expected) = ([0.0; 64], [0.0; 64]);
                        layout.dequantize(&words, &mut found);
                        matrix.dequantize(row, dtype, &mut expected);
                        assert_eq!(
                            found.map(f32::to_bits),
                            expected.map(f32::to_bits),
                            "{bits} bits, {groups} groups, {dtype:?}"
                        );
                    }
                }
            }
        }
    }
}
