//! Launches dequantization.

use super::{
    DequantizeBackend,
    kernel::{RowPartsLaunch, dequantize},
};
use crate::op::launch::{converts_f16, rows_of, vector_size};
use crate::quant::layout::Layout;
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::DType,
};
use burn_cubecl::{CubeBackend, cubecl, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// The number of units in a cube.
const UNITS: usize = 128;

impl DequantizeBackend for CubeBackend {
    fn dequantize(words: IntTensor<Self>, layout: Layout, dtype: DType) -> FloatTensor<Self> {
        let client = words.client.clone();
        let words = rows_of(words);
        let rows = words.meta.shape()[0];
        let numbers = empty(&words, [rows, layout.columns], dtype);
        let all_words = rows * layout.top();
        if all_words == 0 {
            return numbers;
        }
        let codes = layout.format.codes_of_word();
        let vector = vector_size(&client, dtype.size(), &[codes]);
        // SAFETY: unit `i` works only if `i` is below `all_words`, the number of words that hold lower bits of codes. Unit
        // `i` reads the `i`-th word with lower bits, and the upper bits and scales of the same row. The unit writes only the
        // elements of its word.
        unsafe {
            dequantize::launch_unchecked(
                &client,
                cube_count(&client, all_words.div_ceil(UNITS)),
                CubeDim::new_1d(UNITS as u32),
                address_type([&words, &numbers]),
                words.clone().into_tensor_arg(),
                numbers.clone().into_tensor_arg(),
                row_parts(&words, layout),
                layout.top() as u32,
                all_words,
                layout.format,
                converts_f16(&words.device),
                dtype_to_storage_type(dtype),
                vector,
            );
        }
        numbers
    }
}

/// Returns the layout of the packed rows as a kernel argument.
pub(in crate::op) fn row_parts(words: &CubeTensor, layout: Layout) -> RowPartsLaunch {
    RowPartsLaunch::new(
        words.meta.strides()[0] as u32,
        layout.top() as u32,
        layout.scales() as u32,
    )
}
