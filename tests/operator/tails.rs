//! Lengths that fill no tile, and what lies beyond them: keys past a sequence's length, rows and columns
//! around a slice. All of it is NaN or infinite here, and none of it may be seen.

use crate::case::Case;
use crate::compare::{Precision, assert_close};
use crate::dense::{Dense, Layout};
use crate::devices::devices;
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::{DType, Device};

#[test]
fn lengths_around_tile_sizes() {
    for (q_len, kv_len) in [
        (1, 1),
        (1, 33),
        (2, 31),
        (31, 2),
        (32, 32),
        (33, 65),
        (63, 127),
        (64, 64),
        (65, 63),
        (127, 129),
        (128, 128),
        (129, 1),
    ] {
        Case::new([1, 1, 1, q_len, kv_len, 32, 32]).check();
    }
}

#[test]
fn causal_lengths_around_tile_sizes() {
    for (q_len, kv_len) in [(2, 2), (33, 33), (64, 65), (65, 64), (128, 129), (3, 127)] {
        Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([1, 1, 1, q_len, kv_len, 32, 32])
        }
        .check();
    }
}

/// More steps than a software driver's compiler grants one unit's loops.
#[test]
fn long_sequences() {
    Case::new([2, 1, 1, 1500, 1300, 16, 16]).check();
}

const LENGTHS: [i64; 6] = [0, 1, 63, 64, 70, 101];

/// Poison in the keys and values past each sequence's length; zeros there are equivalent.
fn poisoned(case: &Case) -> (Inputs, Inputs) {
    let clean = case.inputs();
    let mut given = clean.clone();
    let lengths = case.kv_lengths.clone().unwrap_or_default();
    let beyond = |[batch, _, row]: [usize; 3]| row as i64 >= lengths[batch];
    given.key.fill_rows(f64::NAN, beyond);
    given.value.fill_rows(f64::INFINITY, beyond);
    (given, clean)
}

#[test]
fn nothing_past_the_length_is_seen() {
    for causal in [
        None,
        Some(CausalAlignment::BottomRight),
        Some(CausalAlignment::TopLeft),
    ] {
        let case = Case {
            causal,
            kv_lengths: Some(LENGTHS.to_vec()),
            ..Case::new([LENGTHS.len(), 2, 1, 66, 101, 32, 32])
        };
        let (given, clean) = poisoned(&case);
        case.check_inputs(&given, &clean);
    }
}

#[test]
fn nothing_past_the_length_is_seen_when_decoding() {
    for q_len in [1, 3] {
        let case = Case {
            causal: Some(CausalAlignment::BottomRight),
            kv_lengths: Some(LENGTHS.to_vec()),
            ..Case::new([LENGTHS.len(), 2, 1, q_len, 101, 32, 32])
        };
        let (given, clean) = poisoned(&case);
        case.check_inputs(&given, &clean);
    }
}

#[test]
fn lengths_beyond_the_keys_are_clamped() {
    let case = Case {
        causal: Some(CausalAlignment::BottomRight),
        kv_lengths: Some(vec![-5, 1000, 40]),
        ..Case::new([3, 2, 1, 66, 70, 32, 32])
    };
    let given = case.inputs();
    let clamped = Inputs {
        kv_lengths: Some(vec![0, 70, 40]),
        ..given.clone()
    };
    case.check_inputs(&given, &clamped);
}

/// A sequence with a length gives what its trimmed keys give without one.
#[test]
fn a_length_is_a_trimmed_sequence() {
    let case = Case {
        causal: Some(CausalAlignment::BottomRight),
        kv_lengths: Some(LENGTHS.to_vec()),
        ..Case::new([LENGTHS.len(), 2, 1, 66, 101, 32, 32])
    };
    let (given, clean) = poisoned(&case);
    let flex = Device::flex();
    for device in devices() {
        let together = case.run(&given, &device.device, case.dtype, Operator::Fused);
        for (batch, length) in LENGTHS
            .into_iter()
            .enumerate()
            .filter(|(_, length)| *length > 0)
        {
            let length = length as usize;
            let alone = Case {
                batch: 1,
                kv_len: length,
                kv_lengths: None,
                ..case.clone()
            };
            let own = |dense: &Dense| {
                let [_, b, c, d] = dense.shape;
                dense.part([batch, 0, 0, 0], [1, b, c, d])
            };
            let trimmed = |dense: &Dense| own(dense).part([0; 4], [1, 1, length, 32]);
            let inputs = Inputs {
                query: own(&clean.query),
                key: trimmed(&clean.key),
                value: trimmed(&clean.value),
                output_gradient: own(&clean.output_gradient),
                lse_gradient: clean.lse_gradient.as_ref().map(own),
                kv_lengths: None,
                ..clean.clone()
            };
            let exact = alone.run(&inputs, &flex, DType::F64, Operator::Reference);
            let baseline = alone.run(&inputs, &flex, case.dtype, Operator::Reference);
            for ((got, exact), baseline) in together.iter().zip(&exact).zip(&baseline) {
                let size = got.values.len() / LENGTHS.len();
                let mut got = got.clone();
                got.values = got.values[batch * size..][..exact.values.len()].to_vec();
                // One sequence's part, and of that the rows of its keys: there is one head of them.
                let precision = Precision {
                    dtype: case.dtype,
                    terms: 101,
                };
                let context = format!("{}, length {length} of {case:?}", device.name);
                assert_close(&context, &got, exact, baseline, precision);
            }
        }
    }
}

#[test]
fn nothing_around_a_slice_is_seen() {
    for layout in [
        Layout::Sliced {
            before: 8,
            after: 4,
        },
        Layout::Sliced {
            before: 5,
            after: 2,
        },
    ] {
        for q_len in [66, 2] {
            Case {
                layouts: [layout, layout, layout, Layout::Contiguous],
                ..Case::new([2, 2, 1, q_len, 70, 32, 32])
            }
            .check();
        }
    }
}
