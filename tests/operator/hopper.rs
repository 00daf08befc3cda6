//! The engine for Hopper, at every head size that has tiles of its own and between: several tiles of queries
//! and blocks of keys with tails, and everything that hides keys, shares tiles or splits them. Each case is
//! checked to be served by that engine; where no device has it there is nothing to test. Forward only: the
//! gradients are another engine's.

use crate::case::{Case, FULL};
use crate::devices::{TestDevice, cube_devices};
use crate::inputs::Inputs;
use attention_cube::plan::Engine;
use attention_cube::{AttentionProblem, CausalAlignment, explain};
use burn::tensor::{DType, Tensor};

/// Key and value widths: every row of the tile tables, and widths that fill no subtile.
const WIDTHS: [(usize, usize); 8] = [
    (40, 24),
    (64, 64),
    (128, 128),
    (192, 128),
    (192, 192),
    (256, 256),
    (320, 320),
    (512, 512),
];

/// More of them, for one test.
const OTHER_WIDTHS: [(usize, usize); 6] = [
    (8, 8),
    (80, 80),
    (96, 96),
    (256, 128),
    (512, 256),
    (576, 512),
];

fn hopper_devices() -> Vec<TestDevice> {
    let is_hopper = |device: &TestDevice| {
        let probe = Tensor::<4>::zeros([1; 4], (&device.device, DType::F32));
        AttentionProblem::new(&probe, &probe, &probe, &Default::default()).is_ok_and(|problem| {
            explain(&problem, &device.device)
                .device
                .is_some_and(|it| it.hopper)
        })
    };
    cube_devices().into_iter().filter(is_hopper).collect()
}

/// Checks `case` in bf16, if some device has the engine.
fn check(case: Case) {
    let case = Case {
        dtype: DType::BF16,
        ..case
    };
    check_poisoned(&case, |_| {});
}

/// The same with what `poison` does to the inputs on the devices.
fn check_poisoned(case: &Case, poison: impl Fn(&mut Inputs)) {
    let devices = hopper_devices();
    if devices.is_empty() {
        return;
    }
    let clean = case.inputs();
    for device in &devices {
        let tracked = device.device.clone().autodiff();
        let tensor = |length, columns, heads| {
            let shape = [case.batch, heads, length, columns];
            Tensor::<4>::zeros(shape, (&tracked, case.dtype))
        };
        let problem = AttentionProblem::new(
            &tensor(case.q_len, case.head_dim, case.q_heads),
            &tensor(case.kv_len, case.head_dim, case.kv_heads),
            &tensor(case.kv_len, case.value_dim, case.kv_heads),
            &case.options(clean.extras(&tracked, case.extras_dtype())),
        )
        .unwrap_or_else(|error| panic!("{case:?}: {error}"));
        let explanation = explain(&problem, &device.device);
        assert_eq!(
            explanation.forward.kernel.engine(),
            Engine::Wgmma,
            "{case:?}: {explanation}"
        );
    }
    let mut given = clean.clone();
    poison(&mut given);
    case.check_forward(&devices, &given, &clean);
}

fn sized([head_dim, value_dim]: [usize; 2]) -> Case {
    Case::new([1, 2, 1, 140, 270, head_dim, value_dim])
}

fn each_width(options: impl Fn(Case) -> Case) {
    for (head_dim, value_dim) in WIDTHS {
        check(options(sized([head_dim, value_dim])));
    }
}

#[test]
fn everything_is_seen() {
    each_width(|case| case);
    for (head_dim, value_dim) in OTHER_WIDTHS {
        check(sized([head_dim, value_dim]));
    }
    for (head_dim, value_dim) in WIDTHS {
        let case = Case {
            dtype: DType::F16,
            ..sized([head_dim, value_dim])
        };
        check_poisoned(&case, |_| {});
    }
}

#[test]
fn causal() {
    for alignment in [CausalAlignment::BottomRight, CausalAlignment::TopLeft] {
        each_width(|case| Case {
            causal: Some(alignment),
            ..case
        });
    }
}

#[test]
fn windows() {
    each_width(|case| Case {
        window: (Some(70), Some(9)),
        ..case
    });
    for (head_dim, value_dim) in [(64, 64), (256, 256), (512, 512)] {
        check(Case {
            causal: Some(CausalAlignment::BottomRight),
            window: (Some(20), None),
            ..Case::new([2, 2, 1, 300, 300, head_dim, value_dim])
        });
    }
}

#[test]
fn masks_and_sinks() {
    each_width(|case| Case {
        mask: Some(FULL),
        sinks: true,
        ..case
    });
}

#[test]
fn biases_and_softcaps() {
    each_width(|case| Case {
        bias: Some(FULL),
        softcap: Some(3.0),
        ..case
    });
}

/// With a scale that is not positive the largest product is not the largest score.
#[test]
fn any_scale() {
    for scale in [-0.3, 0.0, 1.0, 1e-31] {
        for (head_dim, value_dim) in [(64, 64), (512, 512)] {
            check(Case {
                scale: Some(scale),
                ..sized([head_dim, value_dim])
            });
        }
    }
}

#[test]
fn segments() {
    let ids = |length: usize| (0..length as i64).map(|i| i / 80).collect::<Vec<_>>();
    each_width(|case| Case {
        causal: Some(CausalAlignment::BottomRight),
        segments: Some((ids(140), ids(270))),
        ..case
    });
}

/// Keys and values that a mask hides from everybody are NaN, in the middle and at the end of blocks.
#[test]
fn nothing_hidden_is_read() {
    for (head_dim, value_dim) in WIDTHS {
        let lengths = vec![330, 7, 0, 129];
        let case = Case {
            dtype: DType::BF16,
            causal: Some(CausalAlignment::BottomRight),
            kv_lengths: Some(lengths.clone()),
            ..Case::new([4, 2, 1, 70, 330, head_dim, value_dim])
        };
        check_poisoned(&case, |inputs| {
            let beyond = |[batch, _, row]: [usize; 3]| row as i64 >= lengths[batch];
            inputs.key.fill_rows(f64::NAN, beyond);
            inputs.value.fill_rows(f64::INFINITY, beyond);
        });
        let case = Case {
            dtype: DType::BF16,
            segments: Some((
                (0..140).map(|i| i / 70).collect(),
                (0..400).map(|i| i % 200 / 60).collect(),
            )),
            ..Case::new([2, 2, 1, 70, 200, head_dim, value_dim])
        };
        check_poisoned(&case, |inputs| {
            let unseen = |[batch, _, row]: [usize; 3]| row / 60 != batch;
            inputs.key.fill_rows(f64::NAN, unseen);
            inputs.value.fill_rows(f64::NAN, unseen);
        });
    }
}

/// Heads of a group share a tile, also where they do not fill it, and keys are split over cubes.
#[test]
fn few_queries() {
    for (q_heads, kv_heads, q_len) in [(8, 1, 1), (8, 2, 5), (10, 1, 30), (3, 3, 2), (64, 1, 3)] {
        for (head_dim, value_dim) in [(64, 64), (256, 256), (576, 512)] {
            let case = Case {
                causal: Some(CausalAlignment::BottomRight),
                kv_lengths: Some(vec![700, 311]),
                sinks: true,
                ..Case::new([2, q_heads, kv_heads, q_len, 700, head_dim, value_dim])
            };
            check(case);
        }
    }
}

/// Scores far beyond what half precision holds.
#[test]
fn large_scores() {
    for dtype in [DType::F16, DType::BF16] {
        for (head_dim, value_dim) in [(64, 64), (256, 256), (512, 512)] {
            let case = Case {
                dtype,
                scale: Some(1.0),
                amplitude: 8.0,
                ..sized([head_dim, value_dim])
            };
            check_poisoned(&case, |_| {});
        }
    }
}
