//! Tests of values near the largest f32. The kernels first sum the values weighted by the softmax's numerators, and then divide
//! by the denominator. The sum must not overflow.

use crate::dense::read;
use crate::devices::devices;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{DType, Tensor};

/// The number of keys. All keys have the same score.
const KEYS: usize = 64;

/// A power of two that is an upper bound of the softmax's numerators. The kernels sum `kv_len` products of a numerator
/// and a value. This sum stays finite if each value is at most `f32::MAX / (256 · kv_len)`.
const LARGEST_NUMERATOR: f32 = 256.0;

#[test]
fn output_of_largest_allowed_values_is_finite() {
    let value = f32::MAX / (LARGEST_NUMERATOR * KEYS as f32);
    for device in devices() {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1e-2)] {
            if !device.supports(dtype) {
                continue;
            }
            let on = (&device.device, dtype);
            let query = Tensor::<4>::ones([1, 2, 3, 16], on);
            let key = Tensor::<4>::ones([1, 2, KEYS, 16], on);
            let values = Tensor::<4>::full([1, 2, KEYS, 16], value, on);
            let output = fused_attention(query, key, values, AttentionOptions::new());
            for found in read(output) {
                assert!(
                    (found / f64::from(value) - 1.0).abs() < tolerance,
                    "{}, {dtype:?}: {found:e} instead of {value:e}",
                    device.name
                );
            }
        }
    }
}
