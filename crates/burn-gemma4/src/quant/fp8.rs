//! Matrices of 8-bit floats with 4 exponent bits and 3 mantissa bits (E4M3), as compressed-tensors stores them. The
//! kernels' layout has integer codes only, so that these matrices are dequantized while they are loaded.

use super::packed::{read_float, rounded};
use super::scheme::Fp8Scheme;
use burn::tensor::DType;

/// A matrix of E4M3 floats with scales. The lengths of the byte slices match the scheme, the rows and the columns.
pub(crate) struct Fp8<'a> {
    pub rows: usize,
    pub columns: usize,
    /// The elements, `[rows, columns]`.
    pub bytes: &'a [u8],
    /// The scales, in `dtype`. Their shape is that of [`scales_shape`].
    pub scales: &'a [u8],
    pub dtype: DType,
    pub scheme: Fp8Scheme,
}

/// Returns the number of rows and the number of columns of a matrix's scales.
pub(crate) fn scales_shape(scheme: Fp8Scheme, rows: usize, columns: usize) -> [usize; 2] {
    let [of_rows, of_columns] = block(scheme, columns);
    match scheme {
        Fp8Scheme::Tensor => [1, 1],
        _ => [rows.div_ceil(of_rows), columns.div_ceil(of_columns)],
    }
}

/// Returns the number of rows and columns that share a scale. All rows share the scale of a tensor.
fn block(scheme: Fp8Scheme, columns: usize) -> [usize; 2] {
    match scheme {
        Fp8Scheme::Tensor => [usize::MAX, columns],
        Fp8Scheme::Channel => [1, columns],
        Fp8Scheme::Block(block) => block,
    }
}

impl Fp8<'_> {
    /// Dequantizes a row. As in compressed-tensors, the product of an element and its scale is rounded to the scales'
    /// dtype.
    pub fn dequantize(&self, row: usize, values: &mut [f32]) {
        let [of_rows, of_columns] = block(self.scheme, self.columns);
        let [_, scales] = scales_shape(self.scheme, self.rows, self.columns);
        let bytes = &self.bytes[row * self.columns..][..self.columns];
        let parts = values.chunks_mut(of_columns).zip(bytes.chunks(of_columns));
        for (index, (values, bytes)) in parts.enumerate() {
            let scale = read_float(self.scales, row / of_rows * scales + index, self.dtype);
            for (value, byte) in values.iter_mut().zip(bytes) {
                *value = rounded(e4m3(*byte) * scale, self.dtype);
            }
        }
    }
}

/// Converts an E4M3 float. The format has no infinities. All values are exact in f16 and in bf16.
pub(crate) fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    let size = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        // Subnormal elements are multiples of 2^-9.
        (0, _) => mantissa as f32 / 512.0,
        // The exponents are biased by 7 in E4M3, and by 127 in f32.
        _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
    };
    f32::from_bits(size.to_bits() | u32::from(byte & 128) << 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_of_every_byte_is_as_specified() {
        assert_eq!(e4m3(0), 0.0);
        assert_eq!(e4m3(1), 2f32.powi(-9));
        assert_eq!(e4m3(8), 2f32.powi(-6));
        assert_eq!(e4m3(0x38), 1.0);
        assert_eq!(e4m3(0x7e), 448.0);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        for byte in 0..0x7e {
            assert!(e4m3(byte) < e4m3(byte + 1), "{byte}");
            assert_eq!(e4m3(byte | 128).to_bits(), (-e4m3(byte)).to_bits());
        }
    }

    #[test]
    fn dequantize_of_blocks_reads_the_scale_of_row_and_column() {
        let (rows, columns) = (5, 7);
        let scales: Vec<f32> = (1..=6).map(|scale| scale as f32).collect();
        let scales: Vec<u8> = scales
            .iter()
            .flat_map(|scale| scale.to_le_bytes())
            .collect();
        let scheme = Fp8Scheme::Block([2, 4]);
        assert_eq!(scales_shape(scheme, rows, columns), [3, 2]);
        let matrix = Fp8 {
            rows,
            columns,
            bytes: &[0x38; 35],
            scales: &scales,
            dtype: DType::F32,
            scheme,
        };
        for row in 0..rows {
            let mut found = [0.0; 7];
            matrix.dequantize(row, &mut found);
            let first = (row / 2 * 2 + 1) as f32;
            let second = first + 1.0;
            assert_eq!(found, [first, first, first, first, second, second, second]);
        }
    }
}
