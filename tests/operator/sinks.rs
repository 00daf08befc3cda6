//! Tests of sinks as large as the largest scores. With such a sink, one f32 is not precise enough for a logsumexp:
//! rounding removes the part of the row sum that comes from the keys.

use crate::dense::read;
use crate::devices::devices;
use attention_cube::{AttentionOptions, attention_with_lse, fused_attention};
use burn::tensor::{DType, Device, Tensor, TensorData};

/// The number of columns of queries, keys and values. Every engine serves this number.
const WIDTH: usize = 16;

/// Returns a tensor `[1, 1, 1, WIDTH]` that starts with `columns`, followed by zeros.
fn row(columns: &[f64], device: &Device, dtype: DType) -> Tensor<4> {
    let mut values = vec![0.0; WIDTH];
    values[..columns.len()].copy_from_slice(columns);
    let data = TensorData::new(values, [1, 1, 1, WIDTH]);
    Tensor::from_data(data.convert_dtype(dtype), (device, dtype))
}

/// Returns the sinks of a call with one head.
fn sink(value: f64, device: &Device) -> Tensor<1> {
    let data = TensorData::new(vec![value as f32], [1]);
    Tensor::from_data(data, (device, DType::F32))
}

/// Checks the gradient of a sink that equals the only score. The sink and the key then have a probability of ½ each.
/// The elements of the value sum to 1, so the gradient of the sink is −½ · ½.
#[test]
fn sink_equal_to_the_only_score_has_half_of_the_row() {
    for device in devices() {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 1e-3), (DType::BF16, 1e-3)] {
            if !device.supports(dtype) {
                continue;
            }
            let on = &device.device.clone().autodiff();
            for factor in [1.0, 32.0, 1024.0] {
                let operand = row(&[factor; WIDTH], on, dtype);
                let value = row(&[1.0 / WIDTH as f64; WIDTH], on, dtype);
                let score = factor * factor * WIDTH as f64;
                let sink = sink(score, on).require_grad();
                let options = AttentionOptions::new().scale(1.0).sinks(sink.clone());
                let output = fused_attention(operand.clone(), operand, value, options);
                let gradient = sink.grad(&output.sum().backward()).map(read);
                let found = gradient.expect("the sink has a gradient")[0];
                assert!(
                    (found + 0.25).abs() < 0.25 * tolerance,
                    "{}, {dtype:?}, {score}: {found}",
                    device.name
                );
            }
        }
    }
}

/// Checks the gradient of a value. The key of this value has a score that is 3 less than a large sink. The gradient is
/// the attention probability of the key. Half precision is tested only with a bias. With a bias, the backward stores
/// the row maximum and the logarithm of the row sum as two separate numbers.
#[test]
fn sink_above_a_key_keeps_the_value_gradient() {
    let share = 1.0 / (1.0 + 3.0f64.exp());
    for device in devices() {
        for (dtype, has_bias, tolerance) in [
            (DType::F32, false, 1e-4),
            (DType::F32, true, 1e-4),
            (DType::F16, true, 1e-2),
            (DType::BF16, true, 1e-2),
        ] {
            if !device.supports(dtype) {
                continue;
            }
            let on = &device.device.clone().autodiff();
            let query = row(&[1024.0, 1.0], on, dtype);
            let key = row(&[1024.0, -3.0], on, dtype);
            let value = row(&[], on, dtype).require_grad();
            let sink = sink(1024.0 * 1024.0, on);
            let mut options = AttentionOptions::new().scale(1.0).sinks(sink);
            if has_bias {
                options = options.bias(Tensor::zeros([1; 4], (on, DType::F32)));
            }
            let output = fused_attention(query, key, value.clone(), options);
            let gradient = value.grad(&output.sum().backward()).map(read);
            for found in gradient.expect("the value has a gradient") {
                assert!(
                    (found / share - 1.0).abs() < tolerance,
                    "{}, {dtype:?}, {has_bias}: {found} instead of {share}",
                    device.name
                );
            }
        }
    }
}

/// Checks gradients of a key whose score is so far below the sink that f32 loses the key's contribution to the row sum. The
/// gradients are small but not 0.
#[test]
fn sink_far_above_a_key_keeps_small_gradients() {
    const WEIGHT: f64 = 16384.0;
    for device in devices() {
        for (dtype, gap, tolerance) in [
            (DType::F32, 19.0, 1e-4),
            (DType::BF16, 19.0, 1e-2),
            (DType::F16, 17.0, 2e-2),
        ] {
            if !device.supports(dtype) {
                continue;
            }
            let share = f64::exp(-gap) / (1.0 + f64::exp(-gap));
            for has_bias in [false, true] {
                let on = &device.device.clone().autodiff();
                let query = row(&[1.0], on, dtype).require_grad();
                let key = row(&[0.0, 1.0], on, dtype).require_grad();
                let value = row(&[], on, dtype).require_grad();
                let mut options = AttentionOptions::new().scale(1.0).sinks(sink(gap, on));
                if has_bias {
                    options = options.bias(Tensor::zeros([1; 4], (on, DType::F32)));
                }
                let (output, lse) =
                    attention_with_lse(query.clone(), key.clone(), value.clone(), options)
                        .expect("the arguments are valid");
                let loss = output.cast(DType::F32).sum() * WEIGHT + lse.sum() * WEIGHT;
                let gradients = loss.backward();
                let first = |tensor: &Tensor<4>, column: usize| {
                    read(tensor.grad(&gradients).expect("the leaf has a gradient"))[column]
                };
                // The value gets its gradient through the output. The query and the key get their gradients through the
                // logsumexp.
                for (name, found) in [
                    ("value", first(&value, 0)),
                    ("query", first(&query, 1)),
                    ("key", first(&key, 0)),
                ] {
                    assert!(
                        (found / (WEIGHT * share) - 1.0).abs() < tolerance,
                        "{}, {dtype:?}, {has_bias}, {name}: {found:e} instead of {:e}",
                        device.name,
                        WEIGHT * share
                    );
                }
            }
        }
    }
}
