//! Tests of softcaps of every size: far below the scores, near the scores, and so far above that the softcap has no effect in
//! the dtype's precision.

use crate::case::{Case, FULL};
use crate::compare::assert_close;
use crate::devices::devices;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::{DType, Device};

/// The tested softcaps, from a hundredth to the largest f32.
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
fn softcap_of_every_size_matches_reference() {
    for softcap in SOFTCAPS {
        // The amplitude is a factor of the queries and of the keys. The scores are therefore about 1 with the amplitude
        // 1, and about 100 with the amplitude 10.
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
fn softcap_with_other_options_matches_reference() {
    for softcap in [0.1, 50.0, 1e3, 1e8] {
        Case {
            softcap: Some(softcap),
            bias: Some(FULL),
            causal: Some(CausalAlignment::BottomRight),
            mask: Some(FULL),
            ..case()
        }
        .check();
        // The next case has a single query, so it runs the kernels of decode.
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

/// Checks softcaps in half precision, for which some devices have other kernels than for f32. The half-precision kernels
/// have a different tile size for each of the tested head sizes.
#[test]
fn softcap_in_half_precision_matches_reference() {
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

/// Checks a softcap so much smaller than the scale that scale / softcap · log2(e) overflows f32. Scores of 0 must stay 0, with
/// the scale as their gradient. All other scores reach the cap.
#[test]
fn softcap_far_below_the_scale_matches_reference() {
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

/// Checks that a softcap far above the scores changes no result of the operator or of the reference.
#[test]
fn softcap_far_above_the_scores_has_no_effect() {
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
