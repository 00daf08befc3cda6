//! Tests of attention between elementwise operations that Burn fuses. The result must equal the result of an unfused
//! run, in which every tensor is read to the host and written back to the device.

use crate::dense::{Dense, read};
use crate::devices::devices;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{DType, Tensor};
use rand::{SeedableRng, rngs::StdRng};

/// Reads a tensor to the host and writes it back to the device. The read makes Burn run all pending operations, so that
/// Burn cannot fuse them with later operations.
fn materialised(tensor: Tensor<4>) -> Tensor<4> {
    let device = tensor.device();
    let dtype = tensor.dtype();
    Tensor::from_data(tensor.into_data(), (&device, dtype))
}

/// Computes attention, with elementwise operations on its inputs before the call, and on its output and inputs after it. The
/// function calls `between` at each point at which Burn could fuse two operations.
fn block(inputs: &[Tensor<4>; 3], between: impl Fn(Tensor<4>) -> Tensor<4>) -> [Tensor<4>; 3] {
    let [query, key, value] = inputs.clone();
    let query = between(query * 0.5 + 0.25);
    let key = between(key.clone().tanh() + key);
    let value = between(value.swap_dims(1, 2)).swap_dims(1, 2);
    let options = AttentionOptions::new().causal();
    let output = between(fused_attention(
        query.clone(),
        key.clone(),
        value.clone(),
        options,
    ));
    // The next two results use the inputs again. A kernel that has overwritten an input would change these results.
    let first = between(output.clone() * query.clone() + query);
    let second = between((value - 1.0) * (key + 2.0));
    [first, second, output.tanh()]
}

#[test]
fn attention_between_fused_operations_matches_unfused() {
    let mut rng = StdRng::seed_from_u64(crate::case::seed() ^ 0x6675_7365);
    let mut normal = |heads| Dense::normal([2, heads, 66, 32], DType::F32, &mut rng);
    let inputs = [normal(2), normal(2), normal(2)];
    for device in devices() {
        let tensors = inputs
            .each_ref()
            .map(|dense| dense.tensor(&device.device, DType::F32));
        let fused = block(&tensors, |tensor| tensor);
        let stepwise = block(&tensors, materialised);
        for (index, (fused, stepwise)) in fused.into_iter().zip(stepwise).enumerate() {
            for (at, (fused, stepwise)) in read(fused).iter().zip(read(stepwise)).enumerate() {
                // The tolerance is not 0, because fusion may contract a multiplication and an addition into one FMA.
                assert!(
                    (fused - stepwise).abs() <= 1e-5 * (1.0 + stepwise.abs()),
                    "{}, result {index}, [{at}]: {fused} instead of {stepwise}",
                    device.name,
                );
            }
        }
    }
}

/// Checks many calls of different sizes in sequence. The results are read only after the last call.
#[test]
fn attention_many_calls_in_a_row_matches_values() {
    for device in devices() {
        let ones = |length, fill: f64| {
            Tensor::<4>::full([1, 2, length, 32], fill, (&device.device, DType::F32))
        };
        let outputs: Vec<_> = (1..40)
            .map(|length| {
                let value = ones(length, length as f64) + 1.0;
                let options = AttentionOptions::new();
                fused_attention(ones(34, 1.0), ones(length, 1.0), value, options) * 2.0
            })
            .collect();
        for (output, length) in outputs.into_iter().zip(1..40) {
            let expected = 2.0 * (f64::from(length) + 1.0);
            for value in read(output) {
                assert!(
                    (value - expected).abs() < 1e-4 * expected,
                    "{}, {length} keys: {value} instead of {expected}",
                    device.name,
                );
            }
        }
    }
}
