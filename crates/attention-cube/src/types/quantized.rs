//! Quantized rows of keys and values, and the constants of their formats.

use burn::tensor::{Device, Int, Tensor};
use std::fmt;

/// The number of 8-bit codes per 32-bit word.
pub(crate) const CODES: usize = 4;

/// The f32 bits of 2⁻¹¹⁶. If all magnitudes of a row are below 2⁻¹¹⁶, quantization turns the row into zeros. Every
/// scale other than 0 is therefore a normal f32 number.
pub(crate) const ZERO_BELOW: u32 = (127 - 116) << 23;

/// The largest int8 code. Codes lie in −127..=127.
pub(crate) const LARGEST: f32 = 127.0;

/// The largest number of e4m3.
pub(crate) const LARGEST_E4M3: f32 = 448.0;

/// The format of the 8-bit codes of quantized rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CodeFormat {
    /// Integers from −127 to 127, with one scale per row.
    Int8,
    /// Floats with 4 exponent bits and 3 mantissa bits (OCP FP8 E4M3, e4m3fn), with one scale per row, head or tensor.
    E4m3,
}

impl fmt::Display for CodeFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Int8 => "int8",
            Self::E4m3 => "e4m3",
        })
    }
}

/// The keys or the values of an attention call, as rows of 8-bit codes with f32 scales. The shape of the rows is
/// `[batch, kv_heads, kv_len, columns]`.
#[derive(Clone, Debug)]
pub struct QuantizedRows {
    pub(crate) words: Tensor<4, Int>,
    /// The scales, `[batch, kv_heads, kv_len]`. In e4m3, a dimension may be 1: a scale then applies to all indices
    /// along this dimension.
    pub(crate) scales: Tensor<3>,
    pub(crate) format: CodeFormat,
}

impl QuantizedRows {
    /// Returns the shape of the dequantized rows, `[batch, kv_heads, kv_len, columns]`.
    pub fn dims(&self) -> [usize; 4] {
        let [batch, heads, length, words] = self.words.dims();
        [batch, heads, length, words * CODES]
    }

    /// Returns the device of the rows.
    pub fn device(&self) -> Device {
        self.words.device()
    }

    /// Returns the format of the codes.
    pub fn format(&self) -> CodeFormat {
        self.format
    }
}
