//! Copies the keys and values of packed prompts to their slots in KV cache buffers, in place. A slot holds the elements
//! of one token and head. A captured CUDA graph that reads the buffers stays valid.

use super::kernel::{PackedCopyLaunch, copy_packed};
use super::{MOST_CUBES, UNITS_OF_VECTORS};
use crate::op::launch::vector_size;
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{Int, Tensor},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous};
use cube_kit::launch::{address_type, cube_count};
use cubecl::prelude::CubeDim;

/// Copies each token of `sources` to the slot `slots[token]` of `targets`, keys and values in one launch. Slots are
/// counted over all rows of the targets. A token with the slot −1 is not copied. Every handle to the targets sees the
/// new values.
///
/// # Shapes
/// - `targets`: keys and values, `[rows, heads, slots, width]` each, contiguous. They must not share memory with
///   `sources`.
/// - `sources`: keys and values, `[1, heads, tokens, width]` each, in the dtype of the targets.
/// - `slots`: `[tokens]`, 32-bit, each −1 or below the number of slots of all rows.
pub(crate) fn write_packed(
    targets: [Tensor<4>; 2],
    sources: [Tensor<4>; 2],
    slots: Tensor<1, Int>,
) {
    let [targets, sources] = [targets, sources].map(|[keys, values]| KeysAndValues {
        keys: keys.into_dispatch(),
        values: values.into_dispatch(),
    });
    let _: KeysAndValues<Dispatch> =
        Dispatch::write_packed(targets, sources, slots.into_dispatch());
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
pub trait WritePackedBackend: Backend {
    /// See [`write_packed`].
    #[fusion(meta = |targets, _sources, _slots| targets.clone())]
    fn write_packed(
        #[extension_type] targets: KeysAndValues<Self>,
        #[extension_type] sources: KeysAndValues<Self>,
        slots: IntTensor<Self>,
    ) -> KeysAndValues<Self>;
}

impl WritePackedBackend for CubeBackend {
    fn write_packed(
        targets: KeysAndValues<Self>,
        sources: KeysAndValues<Self>,
        slots: IntTensor<Self>,
    ) -> KeysAndValues<Self> {
        let client = targets.keys.client.clone();
        let dtype = targets.keys.dtype;
        let shape: [usize; 4] = targets.keys.meta.shape().dims();
        let [_, heads, target_slots, width] = shape;
        let [tokens] = slots.meta.shape().dims();
        for target in [&targets.keys, &targets.values] {
            assert!(
                target.meta.shape().dims() == shape && target.dtype == dtype,
                "packed keys and values: expected targets of the same shape and dtype"
            );
            assert!(
                target.is_contiguous(),
                "packed keys and values: expected contiguous targets"
            );
        }
        let [keys, values] = [sources.keys, sources.values].map(|source| {
            assert!(
                source.meta.shape().dims() == [1, heads, tokens, width] && source.dtype == dtype,
                "packed keys and values: expected sources of the targets' heads, width and dtype"
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
        let [[key_head, key_token], [value_head, value_token]] = strides;
        let sizes = [width, key_head, key_token, value_head, value_token];
        let vector = vector_size(&client, dtype.size(), &sizes);
        let number = |count: usize| u32::try_from(count).expect("the sizes fit in 32 bits");
        let vectors = |elements: usize| number(elements / vector);
        let copy = PackedCopyLaunch::new(
            number(heads),
            number(tokens),
            vectors(width),
            number(target_slots),
            vectors(key_head),
            vectors(key_token),
            vectors(value_head),
            vectors(value_token),
        );
        let copied = heads * tokens * width / vector;
        let address = address_type([&targets.keys, &targets.values, &keys, &values]);
        // SAFETY: a unit reads a vector of one token and head of both sources. It writes this vector to a slot of both
        // targets only if the slot is not negative, and the caller's slots are below the number of slots. The sources
        // do not share memory with the targets.
        unsafe {
            copy_packed::launch_unchecked(
                &client,
                cube_count(&client, copied.div_ceil(UNITS_OF_VECTORS).min(MOST_CUBES)),
                CubeDim::new_1d(UNITS_OF_VECTORS as u32),
                address,
                keys.into_tensor_arg(),
                values.into_tensor_arg(),
                into_contiguous(slots).into_tensor_arg(),
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
    use burn::tensor::{DType, Device, DeviceKind, Distribution, TensorData};

    fn random(shape: [usize; 4], device: &Device) -> Tensor<4> {
        let distribution = Distribution::Uniform(-99.0, 99.0);
        Tensor::random(shape, distribution, (device, DType::F32))
    }

    fn floats(tensor: Tensor<4>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    /// Checks sources in the order of heads and in the order of tokens, and sources that begin within a larger tensor.
    #[test]
    fn write_packed_copies_tokens_with_slots() {
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let slots = [9, -1, 0, 26, 13, -1];
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
                        let tokens = slots.iter().enumerate().filter(|(_, slot)| **slot >= 0);
                        let written = tokens.fold(target.clone(), |target, (token, slot)| {
                            let (row, slot) = (*slot as usize / 9, *slot as usize % 9);
                            let slices = [row..row + 1, 0..2, slot..slot + 1, 0..width];
                            target.slice_assign(slices, source.clone().narrow(2, token, 1))
                        });
                        floats(written)
                    })
                    .collect();
                let table = TensorData::new(slots.to_vec(), [slots.len()]);
                let table = Tensor::<1, Int>::from_data(table, (&device, DType::I32));
                write_packed(targets.clone(), sources, table);
                let found = targets.map(floats);
                assert_eq!(found.to_vec(), expected, "width {width}, {by_tokens}");
            }
        }
    }
}
