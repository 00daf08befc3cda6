//! Copies one sequence into a row of a KV cache buffer, in place. A captured CUDA graph that reads the buffer stays
//! valid.

use super::kernel::{RowLaunch, copy_row};
use super::{MOST_CUBES, UNITS_OF_VECTORS};
use crate::op::launch::vector_size;
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count};
use cubecl::prelude::CubeDim;

/// Copies the slots of `source` to the first slots of `row` in `target`. A slot holds the `width` elements of one token
/// and head. Every handle to `target` sees the new values.
///
/// # Shapes
/// - `target`: `[rows, heads, slots, width]`, contiguous. It must not share memory with `source`.
/// - `source`: `[1, heads, count, width]`, in the dtype of `target`. `count` is at most `slots`.
pub(crate) fn overwrite_row(target: &Tensor<4>, row: usize, source: Tensor<4>) {
    let target = target.clone().into_dispatch();
    let _ = Dispatch::overwrite_float_row(target, source.into_dispatch(), row);
}

/// Copies integers as [`overwrite_row`] copies floats.
pub(crate) fn overwrite_integer_row(target: &Tensor<4, Int>, row: usize, source: Tensor<4, Int>) {
    let target = target.clone().into_dispatch();
    let _ = Dispatch::overwrite_integer_row(target, source.into_dispatch(), row);
}

/// The backend operators that run the kernel.
#[backend_extension(Cube, Fusion)]
pub trait OverwriteRowBackend: Backend {
    /// See [`overwrite_row`].
    #[fusion(meta = |target, _source, _row| target.clone())]
    fn overwrite_float_row(
        target: FloatTensor<Self>,
        source: FloatTensor<Self>,
        row: usize,
    ) -> FloatTensor<Self>;

    /// See [`overwrite_integer_row`].
    #[fusion(meta = |target, _source, _row| target.clone())]
    fn overwrite_integer_row(
        target: IntTensor<Self>,
        source: IntTensor<Self>,
        row: usize,
    ) -> IntTensor<Self>;
}

impl OverwriteRowBackend for CubeBackend {
    fn overwrite_float_row(
        target: FloatTensor<Self>,
        source: FloatTensor<Self>,
        row: usize,
    ) -> FloatTensor<Self> {
        launch(&target, source, row);
        target
    }

    fn overwrite_integer_row(
        target: IntTensor<Self>,
        source: IntTensor<Self>,
        row: usize,
    ) -> IntTensor<Self> {
        launch(&target, source, row);
        target
    }
}

fn launch(target: &CubeTensor, source: CubeTensor, row: usize) {
    let client = target.client.clone();
    let [rows, heads, slots, width] = target.meta.shape().dims();
    let [one, source_heads, count, source_width] = source.meta.shape().dims();
    assert!(
        one == 1 && source_heads == heads && source_width == width && count <= slots && row < rows,
        "row of a KV cache: expected `row` and the source's slots to fit the target"
    );
    assert_eq!(
        source.dtype, target.dtype,
        "row of a KV cache: expected the same dtype"
    );
    assert!(
        target.is_contiguous(),
        "row of a KV cache: expected a contiguous target"
    );
    let strides = source.meta.strides();
    let source = match strides[3] == 1 && strides[2] == width {
        true => source,
        false => into_contiguous(source),
    };
    let source_stride = source.meta.strides()[1];
    let vector = vector_size(&client, target.dtype.size(), &[width, source_stride]);
    let vectors = |elements: usize| {
        u32::try_from(elements / vector).expect("the vectors of one head fit in 32 bits")
    };
    let sizes = RowLaunch::new(
        heads as u32,
        vectors(count * width),
        vectors(source_stride),
        vectors(slots * width),
        row as u32,
    );
    let copied = heads * count * width / vector;
    // SAFETY: a unit reads vector `v` of a source head and writes vector `v` of the same head in the target's row. `v`
    // is below the number of vectors in `count` slots, and both heads have at least `count` slots. The source does not
    // share memory with the target.
    unsafe {
        copy_row::launch_unchecked(
            &client,
            cube_count(&client, copied.div_ceil(UNITS_OF_VECTORS).min(MOST_CUBES)),
            CubeDim::new_1d(UNITS_OF_VECTORS as u32),
            address_type([target, &source]),
            source.into_tensor_arg(),
            target.clone().into_tensor_arg(),
            sizes,
            dtype_to_storage_type(target.dtype),
            vector,
        );
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device, DeviceKind, Distribution};

    /// Copies the first `count` of 7 slots to row 2 of a target with 4 rows of 9 slots. Returns the expected contents
    /// of the target, the contents after a float copy, and the contents after an integer copy.
    fn copied(width: usize, count: usize) -> [Vec<f32>; 3] {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let distribution = Distribution::Uniform(-99.0, 99.0);
        let random =
            |shape: [usize; 4]| Tensor::<4>::random(shape, distribution, (&device, DType::F32));
        let (source, target) = (random([1, 3, 7, width]), random([4, 3, 9, width]));
        let part = source.narrow(2, 0, count);
        let slices = [2..3, 0..3, 0..count, 0..width];
        let expected = floats(target.clone().slice_assign(slices, part.clone()));
        let integers = target.clone().int();
        overwrite_integer_row(&integers, 2, part.clone().int());
        overwrite_row(&target, 2, part);
        [expected, floats(target), floats(integers.float())]
    }

    fn floats(tensor: Tensor<4>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    #[test]
    fn overwrite_row_copies_slots_to_one_row() {
        for (width, count) in [(8, 7), (8, 3), (5, 4), (1, 1)] {
            let [expected, found, integers] = copied(width, count);
            assert_eq!(found, expected, "width {width}, {count} slots");
            let truncated: Vec<f32> = expected.iter().map(|x| x.trunc()).collect();
            assert_eq!(
                integers, truncated,
                "integers, width {width}, {count} slots"
            );
        }
    }
}
