//! Copies ranges of slots of keys and values to rows of KV cache buffers, in place. A slot holds the elements of one
//! token and head. A captured CUDA graph that reads the buffers stays valid.

use super::kernel::{RangesCopyLaunch, copy_ranges as copy_ranges_kernel};
use super::{MOST_CUBES, UNITS_OF_VECTORS};
use crate::op::launch::vector_size;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Device, Int, Tensor, TensorData},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous};
use cube_kit::launch::address_type;
use cubecl::prelude::{CubeCount, CubeDim};

/// Consecutive slots of the sources, and the slots of the targets to which a launch copies them. After the last slot of
/// the sources, or of the row of the targets, the range continues at slot 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRange {
    /// The first slot in the sources.
    pub first: usize,
    /// The row of the targets.
    pub row: usize,
    /// The first slot in the row of the targets.
    pub target_first: usize,
    /// The number of slots.
    pub count: usize,
}

/// The ranges of one launch, on the device.
#[derive(Clone, Debug)]
pub(crate) struct RangeTable {
    /// The four numbers of each range in the order of [`SlotRange`], `[ranges, 4]`, 32-bit.
    numbers: Tensor<2, Int>,
    /// The largest number of slots of a range.
    longest: usize,
}

impl RangeTable {
    /// Uploads the ranges that are not empty. Returns `None` if all are empty.
    ///
    /// # Panics
    /// Panics if a number does not fit in 31 bits.
    pub fn upload(ranges: impl IntoIterator<Item = SlotRange>, device: &Device) -> Option<Self> {
        let ranges = ranges.into_iter().filter(|range| range.count > 0);
        let ranges: Vec<SlotRange> = ranges.collect();
        let longest = ranges.iter().map(|range| range.count).max()?;
        let number = |count| i32::try_from(count).expect("slots and rows have 31-bit numbers");
        let numbers: Vec<i32> = ranges
            .iter()
            .flat_map(|range| [range.first, range.row, range.target_first, range.count])
            .map(number)
            .collect();
        let numbers = TensorData::new(numbers, [ranges.len(), 4]);
        let numbers = Tensor::from_data(numbers, (device, DType::I32));
        Some(Self { numbers, longest })
    }
}

/// Copies ranges of slots of `sources` to `targets`, keys and values in one launch. Every handle to the targets sees
/// the new values.
///
/// # Shapes
/// - `targets`: keys and values, `[rows, heads, slots, width]` each, contiguous. They must not share memory with
///   `sources`.
/// - `sources`: keys and values, `[1, heads, source slots, width]` each, in the dtype of the targets.
/// - `ranges`: the rows and the first slots exist. No range has more slots than the sources or a row of the targets,
///   and no slot of the targets is in two ranges.
pub(crate) fn copy_ranges(targets: [Tensor<4>; 2], sources: [Tensor<4>; 2], ranges: &RangeTable) {
    let [targets, sources] = [targets, sources].map(|[keys, values]| KeysAndValues {
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
    });
    let numbers = ranges.numbers.clone().into_dispatch();
    let _: KeysAndValues<Dispatch> =
        Dispatch::copy_ranges(targets, sources, numbers, ranges.longest);
}

/// The keys and values of a layer.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct KeysAndValues<B: Backend> {
    pub keys: FloatTensor<B>,
    pub values: FloatTensor<B>,
}

/// The backend operator that runs the kernel.
#[backend_extension(Cube, Fusion)]
pub trait CopyRangesBackend: Backend {
    /// See [`copy_ranges`]. `longest` is the largest number of slots of a range.
    #[fusion(meta = |targets, _sources, _ranges, _longest| targets.clone())]
    fn copy_ranges(
        #[extension_type] targets: KeysAndValues<Self>,
        #[extension_type] sources: KeysAndValues<Self>,
        ranges: IntTensor<Self>,
        longest: usize,
    ) -> KeysAndValues<Self>;
}

impl CopyRangesBackend for CubeBackend {
    fn copy_ranges(
        targets: KeysAndValues<Self>,
        sources: KeysAndValues<Self>,
        ranges: IntTensor<Self>,
        longest: usize,
    ) -> KeysAndValues<Self> {
        let client = targets.keys.client.clone();
        let dtype = targets.keys.dtype;
        let shape: [usize; 4] = targets.keys.meta.shape().dims();
        let [_, heads, target_slots, width] = shape;
        let [_, _, source_slots, _] = sources.keys.meta.shape().dims();
        for target in [&targets.keys, &targets.values] {
            assert!(
                target.meta.shape().dims() == shape && target.dtype == dtype,
                "ranges of keys and values: expected targets of the same shape and dtype"
            );
            assert!(
                target.is_contiguous(),
                "ranges of keys and values: expected contiguous targets"
            );
        }
        assert!(
            longest <= target_slots && longest <= source_slots,
            "ranges of keys and values: expected at most as many slots as sources and targets have"
        );
        let [keys, values] = [sources.keys, sources.values].map(|source| {
            assert!(
                source.meta.shape().dims() == [1, heads, source_slots, width]
                    && source.dtype == dtype,
                "ranges of keys and values: expected sources of the targets' heads, width and dtype"
            );
            match source.meta.strides()[3] == 1 {
                true => source,
                false => into_contiguous(source),
            }
        });
        let strides = [&keys, &values].map(|source| {
            let strides = source.meta.strides();
            [strides[1], strides[2]]
        });
        let [[key_head, key_slot], [value_head, value_slot]] = strides;
        let sizes = [width, key_head, key_slot, value_head, value_slot];
        let vector = vector_size(&client, dtype.size(), &sizes);
        let number = |count: usize| u32::try_from(count).expect("the sizes fit in 32 bits");
        let vectors = |elements: usize| number(elements / vector);
        let copy = RangesCopyLaunch::new(
            number(heads),
            vectors(width),
            number(source_slots),
            number(target_slots),
            vectors(key_head),
            vectors(key_slot),
            vectors(value_head),
            vectors(value_slot),
        );
        let [count, _] = ranges.meta.shape().dims();
        let copied = heads * longest * width / vector;
        let cubes = copied.div_ceil(UNITS_OF_VECTORS).clamp(1, MOST_CUBES);
        let address = address_type([&targets.keys, &targets.values, &keys, &values]);
        // SAFETY: a unit reads a vector of a slot of both sources, and writes this vector to a slot of both targets.
        // The slots are taken modulo their number, and the caller's rows exist. Ranges do not overlap in the targets.
        // The sources do not share memory with the targets.
        unsafe {
            copy_ranges_kernel::launch_unchecked(
                &client,
                CubeCount::Static(number(cubes), number(count), 1),
                CubeDim::new_1d(UNITS_OF_VECTORS as u32),
                address,
                keys.into_tensor_arg(),
                values.into_tensor_arg(),
                into_contiguous(ranges).into_tensor_arg(),
                targets.keys.clone().into_tensor_arg(),
                targets.values.clone().into_tensor_arg(),
                copy,
                dtype_to_storage_type(dtype),
                vector,
            );
        }
        targets
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::*;
    use burn::tensor::{DeviceKind, Distribution};

    fn random(shape: [usize; 4], device: &Device) -> Tensor<4> {
        let distribution = Distribution::Uniform(-99.0, 99.0);
        Tensor::random(shape, distribution, (device, DType::F32))
    }

    fn floats(tensor: Tensor<4>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    /// Checks sources in the order of heads and in the order of tokens, and sources that begin within a larger tensor.
    /// Two ranges continue at slot 0 of the sources or of the targets.
    #[test]
    fn copy_ranges_copies_slots_of_its_ranges() {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let ranges = [
            [1, 0, 2, 4],
            [0, 2, 0, 1],
            [4, 2, 5, 4],
            [2, 1, 7, 0],
            [5, 1, 7, 3],
        ];
        let ranges = ranges.map(|[first, row, target_first, count]| SlotRange {
            first,
            row,
            target_first,
            count,
        });
        for width in [8, 5] {
            for by_tokens in [false, true] {
                let source = || match by_tokens {
                    true => random([1, 8, 2, width], &device).swap_dims(1, 2),
                    false => random([1, 2, 8, width], &device),
                };
                let sources = [source(), source()].map(|source| source.narrow(2, 1, 6));
                let targets = [(); 2].map(|()| random([3, 2, 9, width], &device));
                let expected: Vec<_> = targets
                    .iter()
                    .zip(&sources)
                    .map(|(target, source)| {
                        let slots = ranges.iter().flat_map(|range| {
                            (0..range.count).map(|offset| {
                                let slot = (range.target_first + offset) % 9;
                                ((range.first + offset) % 6, range.row, slot)
                            })
                        });
                        let written = slots.fold(target.clone(), |target, (from, row, slot)| {
                            let slices = [row..row + 1, 0..2, slot..slot + 1, 0..width];
                            target.slice_assign(slices, source.clone().narrow(2, from, 1))
                        });
                        floats(written)
                    })
                    .collect();
                let table = RangeTable::upload(ranges, &device).expect("ranges have slots");
                copy_ranges(targets.clone(), sources, &table);
                let found = targets.map(floats);
                assert_eq!(found.to_vec(), expected, "width {width}, {by_tokens}");
            }
        }
    }

    #[test]
    fn range_table_without_slots_is_none() {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let empty = SlotRange {
            first: 3,
            row: 0,
            target_first: 1,
            count: 0,
        };
        assert!(RangeTable::upload([empty, empty], &device).is_none());
    }
}
