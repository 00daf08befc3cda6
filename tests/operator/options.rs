//! Tests of softcap, sinks, scale and biases with their gradients, one at a time and all together, in every dtype. In half
//! precision, the scores of some cases exceed what half precision can represent.

use crate::case::{Case, FULL};
use attention_cube::CausalAlignment;
use burn::tensor::DType;

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn case() -> Case {
    Case::new([2, 4, 2, 66, 70, 32, 32])
}

#[test]
fn softcap_matches_reference() {
    for (softcap, amplitude) in [(0.5, 1.0), (5.0, 3.0), (50.0, 1.0)] {
        Case {
            softcap: Some(softcap),
            amplitude,
            ..case()
        }
        .check();
    }
}

#[test]
fn scale_matches_reference() {
    for scale in [1.0, 0.0, -0.3, 1e-6] {
        Case {
            scale: Some(scale),
            ..case()
        }
        .check();
    }
}

#[test]
fn sinks_match_reference() {
    for q_len in [66, 2] {
        Case {
            sinks: true,
            q_len,
            ..case()
        }
        .check();
        Case {
            sinks: true,
            lse_gradient: false,
            q_len,
            ..case()
        }
        .check();
    }
}

/// Checks biases of every broadcast shape. The gradient of a bias must have the shape of the bias before the broadcast.
#[test]
fn bias_of_every_broadcast_shape_matches_reference() {
    for bits in 0..16 {
        let extent = [0, 1, 2, 3].map(|dim| bits >> dim & 1 == 1);
        Case {
            bias: Some(extent),
            ..case()
        }
        .check();
    }
}

#[test]
fn bias_under_a_causal_mask_matches_reference() {
    for bias in [
        FULL,
        [false, true, false, true],
        [true, false, true, false],
        [false; 4],
    ] {
        Case {
            bias: Some(bias),
            causal: Some(CausalAlignment::BottomRight),
            kv_lengths: Some(vec![70, 20]),
            ..case()
        }
        .check();
    }
}

#[test]
fn all_options_together_match_reference() {
    Case {
        softcap: Some(4.0),
        sinks: true,
        bias: Some([false, true, true, true]),
        mask: Some([true, false, true, true]),
        causal: Some(CausalAlignment::BottomRight),
        window: (Some(40), Some(0)),
        kv_lengths: Some(vec![70, 33]),
        ..case()
    }
    .check();
}

#[test]
fn half_precision_matches_reference() {
    for dtype in HALVES {
        Case { dtype, ..case() }.check();
        Case {
            dtype,
            q_len: 1,
            ..case()
        }
        .check();
        Case {
            dtype,
            causal: Some(CausalAlignment::BottomRight),
            softcap: Some(10.0),
            sinks: true,
            bias: Some(FULL),
            ..case()
        }
        .check();
    }
}

#[test]
fn half_precision_with_f32_bias_and_sinks_matches_reference() {
    for dtype in HALVES {
        Case {
            dtype,
            bias: Some(FULL),
            sinks: true,
            f32_extras: true,
            ..case()
        }
        .check();
    }
}

/// Checks scores that f16 cannot represent. A QK product reaches about 10⁵, while the largest f16 number is 65504.
#[test]
fn half_precision_with_scores_beyond_f16_matches_reference() {
    for dtype in HALVES {
        for q_len in [40, 1] {
            Case {
                dtype,
                scale: Some(1.0),
                amplitude: 25.0,
                causal: Some(CausalAlignment::BottomRight),
                ..Case::new([1, 2, 1, q_len, 45, 512, 512])
            }
            .check();
        }
    }
}

/// Checks a scale of 1 with head size 512, as in Gemma 4's full (global) attention layers, which normalize queries and keys.
#[test]
fn half_precision_at_scale_one_matches_reference() {
    for dtype in HALVES {
        Case {
            dtype,
            scale: Some(1.0),
            amplitude: 0.2,
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([1, 2, 1, 40, 45, 512, 512])
        }
        .check();
    }
}

/// Checks f64 tensors on devices that support f64. The operator runs the reference for f64.
#[test]
fn f64_matches_reference() {
    for device in crate::devices::devices() {
        if device.supports(DType::F64) {
            Case {
                dtype: DType::F64,
                sinks: true,
                softcap: Some(4.0),
                bias: Some(FULL),
                causal: Some(CausalAlignment::TopLeft),
                ..case()
            }
            .check();
        }
    }
}
