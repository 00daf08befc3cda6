//! Softcaps of every size: far below the scores, among them, and so far above that they are none to the dtype's
//! precision; as biases are added, and in every engine's kernels.

use crate::case::{Case, FULL};
use crate::compare::assert_close;
use crate::devices::devices;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::{DType, Device};

/// From a hundredth to the largest number there is.
const SOFTCAPS: [f64; 16] = [
    1e-2,
    0.1,
    1.0,
    10.0,
    50.0,
    70.0,
    100.0,
    300.0,
    1e3,
    1e4,
    1e6,
    1e8,
    1e12,
    1e25,
    1e38,
    f32::MAX as f64,
];

fn case() -> Case {
    Case::new([1, 2, 1, 66, 70, 32, 32])
}

#[test]
fn of_every_size() {
    for softcap in SOFTCAPS {
        // Scores about 1, and about 100.
        for amplitude in [1.0, 10.0] {
            Case {
                softcap: Some(softcap),
                amplitude,
                ..case()
            }
            .check();
        }
    }
}

#[test]
fn of_every_size_beside_other_options() {
    for softcap in [0.1, 50.0, 1e3, 1e8] {
        Case {
            softcap: Some(softcap),
            bias: Some(FULL),
            causal: Some(CausalAlignment::BottomRight),
            mask: Some(FULL),
            ..case()
        }
        .check();
        // Decoding.
        Case {
            softcap: Some(softcap),
            q_len: 1,
            kv_len: 300,
            sinks: true,
            ..case()
        }
        .check();
    }
}

/// In half precision, whose kernels are others on some devices, at widths that are divided differently there.
#[test]
fn of_every_size_in_half_precision() {
    let case = |width, dtype, softcap| Case {
        softcap: Some(softcap),
        dtype,
        ..Case::new([1, 2, 1, 70, 140, width, width])
    };
    for dtype in [DType::F16, DType::BF16] {
        for softcap in [0.1, 50.0, 300.0, 1e8, f64::from(f32::MAX)] {
            case(64, dtype, softcap).check();
        }
    }
    for width in [64, 128, 256, 320, 512] {
        for bias in [None, Some(FULL)] {
            Case {
                bias,
                causal: bias.map(|_| CausalAlignment::BottomRight),
                ..case(width, DType::BF16, 1e6)
            }
            .check();
        }
    }
}

/// So far below the scale that the quotient of both is beyond f32 in powers of two: scores of 0 stay and have the scale as their slope, and
/// all others are at the cap.
#[test]
fn far_below_the_scale() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for bias in [None, Some(FULL)] {
            let case = Case {
                dtype,
                bias,
                scale: Some(4.0),
                softcap: Some(2e-38),
                ..Case::new([1, 2, 1, 70, 140, 64, 64])
            };
            let mut inputs = case.inputs();
            inputs.query.fill_rows(0.0, |[_, _, query]| query % 2 == 0);
            case.check_inputs(&inputs, &inputs);
        }
    }
}

/// What is so far above the scores changes nothing, of the operator and of its definition.
#[test]
fn the_largest_are_none() {
    let without = case();
    let inputs = without.inputs();
    let exact = without.run(&inputs, &Device::flex(), DType::F64, Operator::Reference);
    for device in devices() {
        for operator in [Operator::Fused, Operator::Reference] {
            let run = |case: &Case| case.run(&inputs, &device.device, case.dtype, operator);
            let none = run(&without);
            for softcap in [1e8, f64::from(f32::MAX)] {
                let got = run(&Case {
                    softcap: Some(softcap),
                    ..without.clone()
                });
                for ((got, exact), none) in got.iter().zip(&exact).zip(&none) {
                    let context = format!("{}, {operator:?}, softcap {softcap:e}", device.name);
                    assert_close(&context, got, exact, none, without.precision());
                }
            }
        }
    }
}
