//! Matrices of 4-bit floats with 2 exponent bits and 1 mantissa bit (E2M1), as compressed-tensors stores them: NVFP4
//! and MXFP4.

use super::fp8::e4m3;
use super::layout::{Codebook, Format, Layout, Rounding, Scales};
use super::pack::Row;
use super::packed::rounded;
use super::scheme::Fp4Scheme;
use burn::tensor::DType;

/// The dtype in which compressed-tensors gives the elements of these formats.
pub(crate) const DTYPE: DType = DType::BF16;

/// A matrix of E2M1 floats with scales. The lengths of the byte slices match the scheme, the rows and the columns.
pub(crate) struct Fp4<'a> {
    pub scheme: Fp4Scheme,
    pub rows: usize,
    pub columns: usize,
    /// The codes, two per byte: the low half of a byte is the element of an even column.
    pub codes: &'a [u8],
    /// The scales, one byte per group: E4M3 floats, or exponents of powers of two with the bias 127.
    pub scales: &'a [u8],
    /// The divisor of all scales.
    pub global_scale: f32,
}

impl Fp4<'_> {
    /// Returns the layout of the matrix's rows, or `None` if the kernels do not support such rows.
    pub fn layout(&self) -> Option<Layout> {
        let format = Format {
            bits: 4,
            group: Some(self.scheme.group()),
            scales: Scales::Single { zero: 0 },
            codebook: Some(Codebook::E2m1),
            rounding: Rounding::BF16,
        };
        Layout::new(format, self.columns)
    }

    /// Packs a row into `words`, which must be all zero.
    pub fn pack(&self, layout: Layout, row: usize, words: &mut [u32]) {
        let (codes, _) = self.codes_of(row).as_chunks();
        for (word, bytes) in words.iter_mut().zip(codes) {
            *word = u32::from_le_bytes(*bytes);
        }
        let mut written = Row { layout, words };
        for group in 0..self.columns / self.scheme.group() {
            written.scales(group, &[self.scale(row, group).to_bits()]);
        }
    }

    /// Dequantizes a row. As in compressed-tensors, the scale and its product with an element are computed in f32, and
    /// the product is rounded to [`DTYPE`].
    pub fn dequantize(&self, row: usize, values: &mut [f32]) {
        let group = self.scheme.group();
        let parts = self.codes_of(row).chunks_exact(group / 2);
        for (index, (values, bytes)) in values.chunks_exact_mut(group).zip(parts).enumerate() {
            let scale = self.scale(row, index);
            for (column, value) in values.iter_mut().enumerate() {
                let code = bytes[column / 2] >> (column % 2 * 4) & 15;
                let number = Codebook::E2m1.number(code.into());
                *value = rounded(number * scale, DTYPE);
            }
        }
    }

    fn codes_of(&self, row: usize) -> &[u8] {
        &self.codes[row * self.columns / 2..][..self.columns / 2]
    }

    /// Returns the scale of a group for numbers of [`Codebook::E2m1`], which are twice the stored floats.
    fn scale(&self, row: usize, group: usize) -> f32 {
        let groups = self.columns / self.scheme.group();
        let byte = self.scales[row * groups + group];
        match self.scheme {
            Fp4Scheme::Nv => e4m3(byte) / self.global_scale * 0.5,
            Fp4Scheme::Mx => match byte {
                // Half of 2^-127 and of 2^-126 are subnormal.
                0 | 1 => f32::from_bits(0x20_0000 << byte),
                // compressed-tensors computes 2^128, which is infinite.
                255 => f32::INFINITY,
                _ => f32::from_bits(u32::from(byte - 1) << 23),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that packed words dequantize to the same bits as the matrix, for every code and all kinds of scales.
    #[test]
    fn pack_of_fp4_dequantizes_to_same_bits() {
        let (rows, columns) = (3, 64);
        let mut state = 5u32;
        let mut random = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (state >> 16) as u8
        };
        for (scheme, global_scale) in [(Fp4Scheme::Nv, 1234.5), (Fp4Scheme::Mx, 1.0)] {
            let codes: Vec<u8> = (0..rows * columns / 2).map(|_| random()).collect();
            let scales: Vec<u8> = (0..rows * columns / scheme.group())
                .map(|_| random() & 0x7e)
                .collect();
            let matrix = Fp4 {
                scheme,
                rows,
                columns,
                codes: &codes,
                scales: &scales,
                global_scale,
            };
            let layout = matrix.layout().expect("the columns are whole groups");
            for row in 0..rows {
                let mut words = vec![0; layout.words()];
                matrix.pack(layout, row, &mut words);
                let (mut found, mut expected) = ([0.0; 64], [0.0; 64]);
                layout.dequantize(&words, &mut found);
                matrix.dequantize(row, &mut expected);
                assert_eq!(
                    found.map(f32::to_bits),
                    expected.map(f32::to_bits),
                    "{scheme:?}"
                );
            }
        }
    }
}
