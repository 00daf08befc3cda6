//! A table of per-layer embeddings that is divided among several device buffers.

use super::layer::{Weight, weight::AnyWeight};
use burn::{
    module::Module,
    tensor::{DType, Int, Tensor},
};

/// A table that is split by rows into several buffers, because it is too large for one device buffer.
#[derive(Module, Debug)]
pub(crate) struct SplitTable {
    /// The buffers of the table. Each holds `[tokens, columns]` for a range of tokens.
    pub parts: Vec<Weight>,
    /// The number of tokens in each buffer. Only the last buffer may have fewer tokens.
    #[module(skip)]
    of_part: usize,
}

impl SplitTable {
    pub fn new(parts: Vec<Weight>, of_part: usize) -> Self {
        Self { parts, of_part }
    }

    /// Looks up the tokens' rows, `[tokens, columns]`, on the device, without a copy of the tokens to the host.
    pub(super) fn rows(&self, tokens: &Tensor<1, Int>) -> Tensor<2> {
        let of_part = |(index, part): (usize, &Weight)| {
            let matrix = part.matrix();
            let inside = tokens.clone() - (index * self.of_part) as i64;
            let nearest = inside.clone().clamp(0, matrix.rows() as i64 - 1);
            (inside, matrix.select(nearest).whole(part.dtype()))
        };
        let mut parts = self.parts.iter().enumerate().map(of_part);
        let (_, first) = parts.next().expect("a split table has at least one part");
        parts.fold(first, |earlier, (inside, rows)| {
            let is_earlier = inside.lower_elem(0).unsqueeze_dim::<2>(1);
            let is_earlier = is_earlier.expand(rows.dims());
            rows.mask_where(is_earlier, earlier)
        })
    }

    /// Returns the whole table as little-endian values of `dtype`.
    pub fn whole(&self, dtype: DType) -> Vec<u8> {
        let mut bytes = Vec::new();
        for part in &self.parts {
            bytes.extend_from_slice(&match part.quantized() {
                Some(numbers) => numbers.bytes(dtype),
                None => part
                    .val()
                    .into_data()
                    .convert_dtype(dtype)
                    .into_bytes()
                    .to_vec(),
            });
        }
        bytes
    }
}
