//! Copies inputs if TMA cannot read their rows in place: see `kernel.rs`.

mod kernel;

use crate::auxiliary::contiguous_copy::kernel::align_rows;
use crate::kernel_args::{
    BROADCAST_KEYS, BROADCAST_QUERIES, collapse_broadcast_dims, is_in_vectors,
};
use crate::types::request::Operands;
use crate::types::tensors::AttentionInputs;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// The alignment of rows that TMA requires, in bytes.
const ROW_BYTES: usize = 16;

const UNITS: usize = 256;

/// Copies the inputs listed in `copies` to rows that TMA can read. See [`aligned`].
pub(crate) fn aligned_inputs(
    inputs: AttentionInputs<CubeBackend>,
    copies: Operands,
) -> AttentionInputs<CubeBackend> {
    AttentionInputs {
        query: aligned(inputs.query, BROADCAST_QUERIES, copies.query),
        key: aligned(inputs.key, BROADCAST_KEYS, copies.key),
        value: aligned(inputs.value, BROADCAST_KEYS, copies.value),
        ..inputs
    }
}

/// If `copied`, returns a copy of the tensor in rows that TMA can read. Otherwise returns the tensor without a copy,
/// but with stride 0 in every leading dimension of size 1. The leading dimensions are all dimensions except the
/// columns.
///
/// `broadcast` is the number of leading dimensions in which TMA accepts a stride of 0. If the tensor has stride 0 in
/// one of these dimensions, the copy has stride 0 in the same dimension.
pub(crate) fn aligned(tensor: CubeTensor, broadcast: usize, copied: bool) -> CubeTensor {
    if !copied {
        return with_legal_strides(tensor);
    }
    let source = collapse_broadcast_dims(&tensor, broadcast);
    let shape = source.meta.shape();
    let [batch, heads, length, columns] = [0, 1, 2, 3].map(|dim| shape[dim]);
    let size = ROW_BYTES / tensor.dtype.size();
    let pitch = columns.next_multiple_of(size);
    let mut target = empty(&tensor, [batch, heads, length, pitch], tensor.dtype);
    let client = target.client.clone();
    let vectors = batch * heads * length * pitch / size;
    let source_vector = [8, 4, 2]
        .into_iter()
        .find(|vector| *vector <= size && is_in_vectors(&source, *vector))
        .unwrap_or(1);
    // SAFETY: unit `i` writes only vector `i` of `target`, and stops at once if `i` is not below `vectors`. The kernel
    // reads `source` only inside its shape.
    unsafe {
        align_rows::launch_unchecked(
            &client,
            cube_count(&client, vectors.div_ceil(UNITS)),
            CubeDim::new_1d(UNITS as u32),
            address_type([&source, &target]),
            source.into_tensor_arg(),
            target.clone().into_tensor_arg(),
            heads as u32,
            length as u32,
            columns as u32,
            (pitch / size) as u32,
            vectors,
            dtype_to_storage_type(tensor.dtype),
            source_vector,
            size,
        );
    }
    for dim in 0..broadcast {
        if tensor.meta.strides()[dim] == 0 {
            target.meta.strides[dim] = 0;
        }
    }
    target.meta.shape = tensor.meta.shape().clone();
    target
}

/// Sets the stride to 0 in every leading dimension of size 1. The leading dimensions are all dimensions except the
/// columns. Burn allows any stride in a dimension of size 1.
///
/// Kernels compute addresses with these strides even for rows past the tensor's end. TMA copies nothing from an address
/// past the end, but requires that this address is a multiple of 16 bytes. With stride 0, the address meets this
/// requirement.
fn with_legal_strides(mut tensor: CubeTensor) -> CubeTensor {
    for dim in 0..3 {
        if tensor.meta.shape()[dim] == 1 {
            tensor.meta.strides[dim] = 0;
        }
    }
    tensor
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel_args::is_tma_readable;
    use crate::testing::cube_device;
    use burn::{
        backend::{ops::FloatTensorOps, read_sync},
        tensor::{Shape, TensorData},
    };

    fn numbers(tensor: CubeTensor) -> Vec<f32> {
        let data = read_sync(CubeBackend::float_into_data(tensor));
        let data = data.expect("the tensor can be read").convert::<f32>();
        data.try_into_vec().expect("the data was converted to f32")
    }

    /// Makes a tensor of `shape`, and calls `view` to get a view of shape `[2, 3, 5, columns]`. Then checks that the
    /// view and its aligned copy have equal elements.
    fn check(shape: [usize; 4], broadcast: usize, view: impl Fn(CubeTensor) -> CubeTensor) {
        let device = cube_device();
        let numbers_of: Vec<f32> = (1..=shape.iter().product())
            .map(|x: usize| x as f32)
            .collect();
        let data = TensorData::new(numbers_of, shape);
        let tensor = view(CubeBackend::float_from_data(data, &device));
        let copy = aligned(tensor.clone(), broadcast, true);
        let context = format!("{tensor:?} as {copy:?}");
        assert_eq!(copy.meta.shape(), tensor.meta.shape(), "{context}");
        assert!(is_tma_readable(&copy, broadcast), "{context}");
        for dim in 0..broadcast {
            let is_broadcast = |tensor: &CubeTensor| tensor.meta.strides()[dim] == 0;
            assert_eq!(is_broadcast(&copy), is_broadcast(&tensor), "{context}");
        }
        assert_eq!(numbers(copy), numbers(tensor), "{context}");
    }

    #[test]
    fn aligned_copy_is_equal_and_readable_by_tma() {
        for columns in [1, 2, 3, 4, 6, 8, 33] {
            check([2, 3, 5, columns], 1, |tensor| tensor);
            // In this view, the columns of a row are not contiguous.
            check([2, 3, columns, 5], 1, |tensor| {
                CubeBackend::float_swap_dims(tensor, 2, 3)
            });
            // In this view, the heads come after the sequence positions in memory, and each row is a slice of a wider row.
            check([2, 5, 3, columns + 3], 2, |tensor| {
                let slices = [
                    (0..2).into(),
                    (0..5).into(),
                    (0..3).into(),
                    (2..columns + 2).into(),
                ];
                let sliced = CubeBackend::float_slice(tensor, &slices);
                CubeBackend::float_swap_dims(sliced, 1, 2)
            });
        }
    }

    /// Checks that a dimension of size 1 gets a stride that TMA accepts. Burn allows any stride in a dimension of size
    /// 1.
    #[test]
    fn aligned_dimension_of_one_has_a_legal_stride() {
        let device = cube_device();
        for shape in [[1, 1, 1, 33], [2, 1, 1, 8], [1, 3, 1, 16], [1, 1, 5, 8]] {
            let data = TensorData::zeros::<f32, _>(shape);
            let tensor = aligned(CubeBackend::float_from_data(data, &device), 2, false);
            for dim in 0..3 {
                let bytes = tensor.meta.strides()[dim] * size_of::<f32>();
                assert!(bytes.is_multiple_of(ROW_BYTES), "{shape:?}: {tensor:?}");
            }
        }
    }

    /// Checks that repeated sequences and heads (stride 0) are copied only once. Repeated rows and columns are copied
    /// in full, because TMA cannot read rows or columns with stride 0.
    #[test]
    fn aligned_broadcast_input_is_copied_once() {
        let expanded = |tensor| CubeBackend::float_expand(tensor, Shape::new([2, 3, 5, 6]));
        for shape in [
            [1, 3, 5, 6],
            [1, 1, 5, 6],
            [2, 1, 1, 6],
            [2, 3, 5, 1],
            [1, 1, 1, 1],
        ] {
            for broadcast in [1, 2] {
                check(shape, broadcast, expanded);
            }
        }
    }
}
