//! Casts both matrices of a LoRA adapter, or both gradients, to another dtype in one launch. With separate launches,
//! launch overhead would take most of the time, because a model has hundreds of small adapters.
//!
//! Budget: one element per unit in registers. Bound: launch latency.

use super::factors::casts_by_operators;
use burn::{backend::cubecl::dtype_to_storage_type, tensor::FloatDType};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::*;

/// The number of units in a cube; each unit casts one element.
const UNITS: usize = 256;

#[cube(launch_unchecked, address_type = "dynamic")]
fn cast_both<I: Float, O: Float>(
    first: &Tensor<I>,
    second: &Tensor<I>,
    first_output: &mut Tensor<O>,
    second_output: &mut Tensor<O>,
    of_first: usize,
    count: usize,
    scale: f32,
    #[define(I)] _from: ElemType,
    #[define(O)] _to: ElemType,
) {
    let at = ABSOLUTE_POS;
    if at < of_first {
        first_output[at] = O::cast_from(first[at]);
    } else if at < count {
        let scaled = f32::cast_from(second[at - of_first]) * scale;
        second_output[at - of_first] = O::cast_from(scaled);
    }
}

/// Casts two matrices to `dtype`, and multiplies the second matrix by `scale`. The product is rounded once.
pub(super) fn casts(factors: [CubeTensor; 2], scale: f64, dtype: FloatDType) -> [CubeTensor; 2] {
    let to = dtype.into();
    let [from, other] = factors.each_ref().map(|factor| factor.dtype);
    if from == to || from != other {
        return casts_by_operators::<CubeBackend>(factors, scale, dtype);
    }
    let [first, second] = factors.map(into_contiguous);
    let client = first.client.clone();
    let outputs = [&first, &second].map(|factor| empty(factor, factor.meta.shape().clone(), to));
    let [of_first, of_second] = [&first, &second].map(|factor| factor.meta.num_elements());
    let count = of_first + of_second;
    let [first_output, second_output] = outputs.clone().map(CubeTensor::into_tensor_arg);
    // SAFETY: each unit reads one element of `first` or `second`, and writes the element with the same index of the
    // corresponding output. The index is below the number of elements in both the read tensor and the output.
    unsafe {
        cast_both::launch_unchecked(
            &client,
            cube_count(&client, count.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            address_type([&first, &second]),
            first.into_tensor_arg(),
            second.into_tensor_arg(),
            first_output,
            second_output,
            of_first,
            count,
            scale as f32,
            dtype_to_storage_type(from),
            dtype_to_storage_type(to),
        );
    }
    outputs
}
