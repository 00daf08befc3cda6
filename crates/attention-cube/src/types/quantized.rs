//! Int8 rows of keys and values, and the constants of their format.

use burn::tensor::{Device, Int, Tensor};

/// The number of int8 codes per 32-bit word.
pub(crate) const CODES: usize = 4;

/// The f32 bits of 2⁻¹¹⁶. Rows with smaller magnitudes become zero, so that all scales other than 0 are normal f32 numbers.
pub(crate) const ZERO_BELOW: u32 = (127 - 116) << 23;

/// The largest int8 code. Codes lie in −127..=127.
pub(crate) const LARGEST: f32 = 127.0;

/// Int8 rows with an f32 scale per row, `[batch, kv_heads, kv_len, columns]`: the keys or the values of an attention call.
#[derive(Clone, Debug)]
pub struct QuantizedRows {
    pub(crate) words: Tensor<4, Int>,
    pub(crate) scales: Tensor<3>,
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
}
