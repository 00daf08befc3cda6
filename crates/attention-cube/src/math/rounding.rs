//! Rounding of f32 values to the element type of an output.

pub(crate) use cube_kit::rounding::{rounded, rounded_vector};

#[cfg(test)]
mod tests {
    use crate::testing::cube_device;
    use burn::tensor::bf16;
    use cube_kit::rounding::convertible;
    use cubecl::ir::{ElemType, FloatKind};
    use cubecl::prelude::*;

    const UNITS: usize = 64;

    /// Writes the rounded values as u32 bits, because drivers may change the bits of floats that a kernel writes.
    #[cube(launch_unchecked)]
    fn convertible_bits<E: Float>(
        values: &[u32],
        results: &mut [u32],
        #[define(E)] _element: ElemType,
    ) {
        if ABSOLUTE_POS < values.len() {
            let value = f32::reinterpret(values[ABSOLUTE_POS]);
            results[ABSOLUTE_POS] = u32::reinterpret(convertible::<E>(value));
        }
    }

    /// Runs the kernel and returns the f32 bits of the rounded values. Each value is representable in the dtype
    /// `element`, but has not been converted to this dtype.
    fn before_conversion(values: &[u32], element: FloatKind) -> Vec<u32> {
        let client = cube_device().client();
        let source = client.create_from_slice(u32::as_bytes(values));
        let target = client.empty(size_of_val(values));
        // SAFETY: the kernel reads and writes only at indices below `values.len()`, the size of both buffers.
        unsafe {
            convertible_bits::launch_unchecked(
                &client,
                CubeCount::Static(values.len().div_ceil(UNITS) as u32, 1, 1),
                CubeDim::new_1d(UNITS as u32),
                BufferArg::from_raw_parts(source, values.len()),
                BufferArg::from_raw_parts(target.clone(), values.len()),
                ElemType::Float(element),
            );
        }
        let bytes = client.read_one(target).expect("the kernel completes");
        u32::from_bytes(&bytes).to_vec()
    }

    /// Returns bit patterns next to every rounding tie of bf16, and bit patterns spread over the whole range of u32.
    fn samples() -> Vec<u32> {
        let lower = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
        let about_ties = (0..1 << 16).flat_map(|upper| lower.map(|lower| (upper << 16) | lower));
        // Multiplication by an odd constant permutes all u32 values, so the samples spread evenly.
        let all_over = (0..1 << 20).map(|index: u32| index.wrapping_mul(0x9e37_79b1));
        about_ties.chain(all_over).collect()
    }

    #[test]
    fn convertible_bf16_rounds_to_nearest_even() {
        let samples = samples();
        let results = before_conversion(&samples, FloatKind::BF16);
        assert_eq!(results.len(), samples.len());
        for (value, result) in samples.into_iter().zip(results) {
            let expected = u32::from(bf16::from_f32(f32::from_bits(value)).to_bits()) << 16;
            assert_eq!(result, expected, "{value:#010x}");
        }
    }

    #[test]
    fn convertible_f16_and_f32_leaves_bits_unchanged() {
        let samples = samples();
        for element in [FloatKind::F16, FloatKind::F32] {
            assert_eq!(before_conversion(&samples, element), samples);
        }
    }
}
