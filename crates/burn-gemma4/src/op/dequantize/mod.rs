//! Dequantization of packed rows to floats.

#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cube")]
pub(super) mod kernel;
#[cfg(feature = "cube")]
mod launch;

#[cfg(feature = "cube")]
pub(super) use launch::row_parts;

use crate::quant::layout::Layout;
#[cfg(feature = "cube")]
use burn::{backend::fusion::custom::TensorSpec, tensor::Shape};
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Tensor},
};

/// Dequantizes packed rows, `[rows, words]`, to `[rows, columns]`. The values are rounded as the format requires, and then to
/// `dtype`.
pub(crate) fn dequantize(words: Tensor<2, Int>, layout: Layout, dtype: DType) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::dequantize(words.into_dispatch(), layout, dtype))
}

/// The backend operator that dequantizes packed rows.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Fusion: cfg(feature = "cube")
)]
pub trait DequantizeBackend: Backend {
    /// See [`dequantize`].
    #[fusion(meta = |words, layout, dtype| metadata(words, layout, dtype))]
    fn dequantize(words: IntTensor<Self>, layout: Layout, dtype: DType) -> FloatTensor<Self>;
}

/// Returns the shape and dtype of the output, which Burn's fusion needs before it runs the operator.
#[cfg(feature = "cube")]
fn metadata(words: &TensorSpec, layout: &Layout, dtype: &DType) -> TensorSpec {
    TensorSpec::new(Shape::new([words.shape[0], layout.columns]), *dtype)
}

#[cfg(all(test, any(feature = "cube", feature = "flex")))]
pub(super) mod tests {
    use super::*;
    use crate::quant::blocks::BlockFormat;
    use crate::quant::layout::{Codebook, Format, Rounding, Scales};
    use crate::quant::rows::dequantized;
    use burn::tensor::{Device, TensorData};

    /// Returns the words of `rows` packed rows, filled with pseudorandom bits. No scale is NaN.
    pub(crate) fn words(layout: Layout, rows: usize) -> Vec<u32> {
        let mut state = 7u32;
        let mut random = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            (state >> 16) ^ (state << 11)
        };
        let of_row = layout.words();
        let mut words: Vec<u32> = (0..rows * of_row).map(|_| random()).collect();
        for row in words.chunks_exact_mut(of_row) {
            for (at, word) in row[layout.scales()..].iter_mut().enumerate() {
                match layout.format.scales {
                    Scales::Half { .. } | Scales::HalfAndLeast => *word &= 0xbfff_bfff,
                    Scales::Bytes { .. } | Scales::BytesAndLeast | Scales::NibblesAndLeast
                        if at % 5 == 0 =>
                    {
                        *word &= 0xbfff_bfff;
                    }
                    Scales::SingleAndZero if at % 2 == 1 => *word &= 255,
                    // Keep the magnitudes of the scales between 2⁻³¹ and 2. In f16 many dequantized values are then
                    // subnormal.
                    Scales::Single { .. } | Scales::SingleAndZero => {
                        *word = *word & 0x8fff_ffff | 0x3000_0000;
                    }
                    Scales::Bytes { .. } | Scales::BytesAndLeast | Scales::NibblesAndLeast => {}
                }
            }
        }
        words
    }

    /// Returns the rows of [`words`], with the scales further restricted to magnitudes that real weights have.
    pub(crate) fn even_words(layout: Layout, rows: usize) -> Vec<u32> {
        let mut words = words(layout, rows);
        for row in words.chunks_exact_mut(layout.words()) {
            for (at, word) in row[layout.scales()..].iter_mut().enumerate() {
                match layout.format.scales {
                    Scales::Half { .. } | Scales::HalfAndLeast => {
                        *word = *word & 0x8fff_8fff | 0x2000_2000;
                    }
                    Scales::Bytes { .. } | Scales::BytesAndLeast | Scales::NibblesAndLeast
                        if at % 5 == 0 =>
                    {
                        *word = *word & 0x8fff_8fff | 0x2000_2000;
                    }
                    Scales::SingleAndZero if at % 2 == 1 => {}
                    Scales::Single { .. } | Scales::SingleAndZero => {
                        *word = *word & 0x81ff_ffff | 0x3c00_0000;
                    }
                    Scales::Bytes { .. } | Scales::BytesAndLeast | Scales::NibblesAndLeast => {}
                }
            }
        }
        words
    }

    /// Returns layouts of all formats that checkpoints contain.
    pub(crate) fn layouts() -> Vec<Layout> {
        let of_blocks = BlockFormat::ALL
            .map(|(format, _)| format.words(512).expect("the columns are whole blocks"));
        let mut layouts = of_blocks.to_vec();
        for rounding in [Rounding::F16, Rounding::BF16] {
            let format = Format {
                bits: 4,
                group: Some(16),
                scales: Scales::Single { zero: 0 },
                codebook: Some(Codebook::E2m1),
                rounding,
            };
            layouts.push(Layout::new(format, 288).expect("the columns are whole groups"));
        }
        for bits in [4, 8] {
            let zero = 1 << (bits - 1);
            for scales in [Scales::Single { zero }, Scales::SingleAndZero] {
                for rounding in [Rounding::None, Rounding::F16, Rounding::BF16] {
                    for group in [Some(8), Some(32), Some(96), None] {
                        let format = Format {
                            bits,
                            group,
                            scales,
                            codebook: None,
                            rounding,
                        };
                        layouts
                            .push(Layout::new(format, 288).expect("the columns are whole groups"));
                    }
                }
            }
        }
        layouts
    }

    pub(crate) fn devices() -> Vec<Device> {
        [
            #[cfg(feature = "flex")]
            Device::flex(),
            #[cfg(feature = "cube")]
            Device::default(),
        ]
        .into()
    }

    #[test]
    fn dequantize_matches_layout_bit_by_bit() {
        let rows = 37;
        for device in devices() {
            for layout in layouts() {
                let of_row = layout.words();
                let words = words(layout, rows);
                let data = TensorData::new(words.clone(), [rows, of_row]);
                let tensor = Tensor::<2, Int>::from_data(data, (&device, DType::U32));
                for dtype in [DType::F32, DType::F16, DType::BF16] {
                    if !device.supports_dtype(dtype) {
                        continue;
                    }
                    // Dequantize a slice of the rows, so that the first row does not begin at the start of the buffer.
                    let (first, count) = (5, 30);
                    let shape = vec![count, layout.columns];
                    let expected =
                        dequantized(first..first + count, shape, dtype, |row, numbers| {
                            layout.dequantize(&words[row * of_row..][..of_row], numbers);
                        });
                    let part = tensor.clone().narrow(0, first, count);
                    let found = dequantize(part, layout, dtype).into_data();
                    assert_eq!(found.dtype(), expected.dtype());
                    let differ = found.as_bytes() != expected.as_bytes();
                    assert!(!differ, "{layout:?} in {dtype:?} on {device:?}");
                }
            }
        }
    }
}
