//! Tests that only a bias of −∞ hides a key. If the bias is the dtype's lowest finite number, the key's score enters the
//! softmax like any other score. A query still attends to its keys if all its keys have this bias.

use crate::case::{Case, FULL};
use crate::dense::Dense;
use burn::tensor::DType;

/// Checks a case with the bias `lowest` for some scores. For every third query, all keys have this bias. For the remaining
/// queries, every third key has this bias.
pub(crate) fn check_lowest(case: &Case, lowest: f64) {
    let mut inputs = case.inputs();
    let shape = inputs.bias.as_ref().expect("the case has a bias").shape;
    inputs.bias = Some(Dense::from_fn(shape, |[_, _, query, key]| {
        match query % 3 == 0 || key % 3 == 1 {
            true => lowest,
            false => (query + key) as f64 / 64.0,
        }
    }));
    case.check_inputs(&inputs, &inputs);
}

#[test]
fn bias_lowest_finite_is_an_ordinary_score() {
    for (q_len, kv_len, head_dim) in [(70, 66, 32), (2, 66, 32), (3, 700, 64)] {
        for (dtype, f32_extras, value, sinks) in [
            (DType::F32, true, f64::from(f32::MIN), false),
            (DType::F32, true, -1e30, true),
            (DType::F16, true, f64::from(f32::MIN), true),
            (DType::F16, false, -65504.0, false),
            (DType::BF16, true, -3e38, false),
            // The bits 0xFF7F_0000 are the lowest finite bf16 number, as an f32.
            (
                DType::BF16,
                false,
                f64::from(f32::from_bits(0xFF7F_0000)),
                true,
            ),
        ] {
            let case = Case {
                dtype,
                f32_extras,
                sinks,
                bias: Some(FULL),
                ..Case::new([1, 2, 1, q_len, kv_len, head_dim, head_dim])
            };
            check_lowest(&case, value);
        }
    }
}
