//! Dequantization on the CPU.

use super::DequantizeBackend;
use crate::quant::layout::Layout;
use crate::quant::rows::dequantized;
use burn::{
    backend::{
        Flex,
        ops::FloatTensorOps,
        tensor::{Device, FloatTensor, IntTensor},
    },
    tensor::DType,
};

impl DequantizeBackend for Flex {
    fn dequantize(words: IntTensor<Self>, layout: Layout, dtype: DType) -> FloatTensor<Self> {
        let words = words.to_contiguous();
        let first = words.layout().start_offset();
        let rows = words.layout().shape()[0];
        let of_row = layout.words();
        let all = &words.storage::<u32>()[first..][..rows * of_row];
        let numbers = dequantized(
            0..rows,
            vec![rows, layout.columns],
            dtype,
            |row, numbers| {
                layout.dequantize(&all[row * of_row..][..of_row], numbers);
            },
        );
        Self::float_from_data(numbers, &Device::<Self>::default())
    }
}
