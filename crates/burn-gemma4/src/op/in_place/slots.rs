//! Copies consecutive slots of one sequence's KV buffers, in place. A slot holds the elements of one token and head. A
//! captured CUDA graph that reads the target stays valid.

use super::kernel::{SlotCopyLaunch, copy_slots};
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

/// Writes the slots of `source` to consecutive slots of `target`, beginning at slot `first`. The position is read from
/// the device, so a captured CUDA graph can write to other slots at each replay. Slots beyond the end of the target are
/// dropped. Returns a handle to the memory of `target`. Reads through this handle run after the write.
///
/// # Shapes
/// - `target`: `[1, heads, slots, width]`, contiguous. It must not share memory with `source`.
/// - `source`: `[1, heads, count, width]`, in the dtype of `target`.
/// - `first`: `[1]`, 32-bit and not negative.
pub(crate) fn write_slots(
    target: Tensor<4>,
    source: Tensor<4>,
    first: Tensor<1, Int>,
) -> Tensor<4> {
    Tensor::from_dispatch(Dispatch::write_slots(
        target.into_dispatch(),
        source.into_dispatch(),
        first.into_dispatch(),
    ))
}

/// Fills `target` with consecutive slots of a ring buffer, beginning at slot `first`. After the last slot of the ring
/// buffer, the copy continues at slot 0. Every handle to `target` sees the new values.
///
/// # Shapes
/// - `target`: `[1, heads, count, width]`, contiguous. It must not share memory with `ring`.
/// - `ring`: `[1, heads, slots, width]`, in the dtype of `target`. `count` is at most `slots`, and `first` is below
///   `slots`.
pub(crate) fn copy_from_ring(target: &Tensor<4>, ring: Tensor<4>, first: usize) {
    let target = target.clone().into_dispatch();
    let _ = Dispatch::copy_from_ring(target, ring.into_dispatch(), first);
}

/// The backend operators that run the kernel.
#[backend_extension(Cube, Fusion)]
pub trait CopySlotsBackend: Backend {
    /// See [`write_slots`].
    #[fusion(meta = |target, _source, _first| target.clone())]
    fn write_slots(
        target: FloatTensor<Self>,
        source: FloatTensor<Self>,
        first: IntTensor<Self>,
    ) -> FloatTensor<Self>;

    /// See [`copy_from_ring`].
    #[fusion(meta = |target, _ring, _first| target.clone())]
    fn copy_from_ring(
        target: FloatTensor<Self>,
        ring: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self>;
}

impl CopySlotsBackend for CubeBackend {
    fn write_slots(
        target: FloatTensor<Self>,
        source: FloatTensor<Self>,
        first: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let [_, _, count, _] = source.meta.shape().dims();
        launch(&target, source, Some(first), 0, count);
        target
    }

    fn copy_from_ring(
        target: FloatTensor<Self>,
        ring: FloatTensor<Self>,
        first: usize,
    ) -> FloatTensor<Self> {
        let [_, _, count, _] = target.meta.shape().dims();
        let [_, _, slots, _] = ring.meta.shape().dims();
        assert!(
            count <= slots && first < slots,
            "ring buffer: expected no more copied slots than it has"
        );
        launch(&target, ring, None, first, count);
        target
    }
}

/// Copies `count` slots of `source`, beginning at slot `source_first`, to `target`, beginning at slot `first`, or at
/// slot 0 without `first`.
fn launch(
    target: &CubeTensor,
    source: CubeTensor,
    first: Option<CubeTensor>,
    source_first: usize,
    count: usize,
) {
    let client = target.client.clone();
    let [one, heads, slots, width] = target.meta.shape().dims();
    let [source_one, source_heads, source_slots, source_width] = source.meta.shape().dims();
    assert!(
        one == 1 && source_one == 1 && source_heads == heads && source_width == width,
        "slots of a KV buffer: expected equal heads and widths"
    );
    assert_eq!(
        source.dtype, target.dtype,
        "slots of a KV buffer: expected the same dtype"
    );
    assert!(
        target.is_contiguous(),
        "slots of a KV buffer: expected a contiguous target"
    );
    let source = match source.meta.strides()[3] == 1 {
        true => source,
        false => into_contiguous(source),
    };
    let (head_stride, slot_stride) = (source.meta.strides()[1], source.meta.strides()[2]);
    let sizes = [width, head_stride, slot_stride];
    let vector = vector_size(&client, target.dtype.size(), &sizes);
    let number = |count: usize| u32::try_from(count).expect("the slots of one head fit in 32 bits");
    let vectors = |elements: usize| number(elements / vector);
    let copy = SlotCopyLaunch::new(
        number(heads),
        number(count),
        vectors(width),
        number(source_slots),
        number(source_first),
        vectors(slot_stride),
        vectors(head_stride),
        number(slots),
    );
    let copied = heads * count * width / vector;
    let first = first.map(|first| into_contiguous(first).into_tensor_arg());
    // SAFETY: a unit reads vectors of one slot of the source, whose index is taken modulo the number of slots. It writes
    // vectors of one slot of the target, whose index it compares with the number of slots. The source does not share
    // memory with the target.
    unsafe {
        copy_slots::launch_unchecked(
            &client,
            cube_count(&client, copied.div_ceil(UNITS_OF_VECTORS).min(MOST_CUBES)),
            CubeDim::new_1d(UNITS_OF_VECTORS as u32),
            address_type([target, &source]),
            source.into_tensor_arg(),
            first.into(),
            target.clone().into_tensor_arg(),
            copy,
            dtype_to_storage_type(target.dtype),
            vector,
        );
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use burn::tensor::{DType, Device, DeviceKind, Distribution, TensorData};

    fn random(shape: [usize; 4], device: &Device) -> Tensor<4> {
        let distribution = Distribution::Uniform(-99.0, 99.0);
        Tensor::random(shape, distribution, (device, DType::F32))
    }

    fn floats(tensor: Tensor<4>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    /// Checks sources in the order of heads and in the order of slots, and a source that reaches beyond the end of the
    /// target.
    #[test]
    fn write_slots_writes_from_the_slot_on_the_device() {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        for (width, count, first) in [(8, 3, 2), (5, 4, 0), (6, 1, 8), (8, 5, 7)] {
            let kept = count.min(9 - first);
            for by_slots in [false, true] {
                let source = match by_slots {
                    true => random([1, count, 3, width], &device).swap_dims(1, 2),
                    false => random([1, 3, count, width], &device),
                };
                let target = random([1, 3, 9, width], &device);
                let slices = [0..1, 0..3, first..first + kept, 0..width];
                let kept = source.clone().narrow(2, 0, kept);
                let expected = target.clone().slice_assign(slices, kept);
                let position = TensorData::new(vec![first as i32], [1]);
                let position = Tensor::<1, Int>::from_data(position, (&device, DType::I32));
                let found = write_slots(target, source, position);
                let case = format!("width {width}, {count} slots at {first}, {by_slots}");
                assert_eq!(floats(found), floats(expected), "{case}");
            }
        }
    }

    #[test]
    fn copy_from_ring_continues_at_slot_0() {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        for (width, count, first) in [(8, 7, 0), (8, 6, 4), (5, 7, 6), (3, 1, 2)] {
            let ring = random([1, 2, 7, width], &device);
            let twice = Tensor::cat(vec![ring.clone(), ring.clone()], 2);
            let target = random([1, 2, count, width], &device);
            copy_from_ring(&target, ring, first);
            let expected = twice.narrow(2, first, count);
            let case = format!("width {width}, {count} slots from {first}");
            assert_eq!(floats(target), floats(expected), "{case}");
        }
    }
}
