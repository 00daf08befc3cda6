//! Launches the argmax of rows.

use super::{
    ArgmaxBackend, NUMBERS,
    kernel::{HELD, UNITS, argmax_pdl},
};
use burn::{
    backend::{
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::supports_pdl;
use cubecl::prelude::CubeDim;

impl ArgmaxBackend for CubeBackend {
    fn argmax(logits: FloatTensor<Self>) -> IntTensor<Self> {
        let rows = logits.meta.shape()[0];
        let [largest, numbers] = of_stretches(logits);
        let numbers = match largest.meta.shape()[1] {
            1 => numbers,
            _ => launch(largest, Some(numbers), 1)[1].clone(),
        };
        burn_cubecl::ops::reshape(numbers, Shape::new([rows]))
    }
}

/// Divides each row into `stretches` sections. Returns the largest value of each section, and the column of this value. Both
/// tensors are `[rows, stretches]`.
pub(in crate::op) fn of_stretches(logits: CubeTensor) -> [CubeTensor; 2] {
    let stretches = logits.meta.shape()[1].div_ceil(HELD * UNITS);
    launch(logits, None, stretches)
}

fn launch(
    values: CubeTensor,
    columns_of_values: Option<CubeTensor>,
    stretches: usize,
) -> [CubeTensor; 2] {
    let client = values.client.clone();
    let values = into_contiguous(values);
    let [rows, columns] = [values.meta.shape()[0], values.meta.shape()[1]];
    let largest = empty(&values, [rows, stretches], DType::F32);
    let numbers = empty(&values, [rows, stretches], NUMBERS);
    let element = dtype_to_storage_type(values.dtype);
    // SAFETY: each cube reads columns below `columns` of one of the `rows` rows of `values`. Each of the
    // `rows · stretches` cubes writes only its own element of `largest` and of `numbers`.
    unsafe {
        argmax_pdl::launch_unchecked(
            &client,
            cube_count(&client, rows * stretches),
            CubeDim::new_1d(UNITS as u32),
            address_type([&values]),
            values.into_tensor_arg(),
            columns_of_values.map(CubeTensor::into_tensor_arg).into(),
            largest.clone().into_tensor_arg(),
            numbers.clone().into_tensor_arg(),
            rows as u32,
            columns as u32,
            stretches as u32,
            columns.div_ceil(stretches).div_ceil(UNITS).min(HELD),
            supports_pdl(&client),
            element,
            dtype_to_storage_type(NUMBERS),
        );
    }
    [largest, numbers]
}
