//! Softcap, sinks, scale and biases with their gradients, alone and together, in every dtype; half
//! precision at sizes whose scores it could not hold.

use crate::case::{Case, FULL};
use attention_cube::CausalAlignment;
use burn::tensor::DType;

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

fn case() -> Case {
    Case::new([2, 4, 2, 66, 70, 32, 32])
}

#[test]
fn softcap() {
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
fn scales() {
    for scale in [1.0, 0.0, -0.3, 1e-6] {
        Case {
            scale: Some(scale),
            ..case()
        }
        .check();
    }
}

#[test]
fn sinks() {
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

/// Every broadcast of a bias has a gradient of its own shape.
#[test]
fn biases_of_every_broadcast_shape() {
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
fn biases_under_a_mask() {
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
fn everything_at_once() {
    Case {
        softcap: Some(4.0),
        sinks: true,
        bias: Some([false, true, true, true]),
        mask: Some([true, false, true, true]),
        causal: Some(CausalAlignment::BottomRight),
        window: (Some(40), Some(0)),
        kv_lengths: Some(vec![70, 33]),
        deterministic: true,
        ..case()
    }
    .check();
}

#[test]
fn deterministic() {
    Case {
        deterministic: true,
        ..case()
    }
    .check();
}

#[test]
fn half_precision() {
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
fn half_precision_with_full_precision_extras() {
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

/// `q·k` reaches some 10⁵ here; f16 ends at 65504.
#[test]
fn half_precision_holds_no_scores() {
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

/// Gemma 4's global layers: normalised queries and keys, no scale.
#[test]
fn half_precision_at_scale_one() {
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

/// f64 where the reference runs.
#[test]
fn double_precision() {
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
