//! Tests of lengths that are not multiples of a tile's size. The memory around the data holds NaN or infinity: keys
//! past a sequence's length, and the rows and columns outside of a slice. No result may depend on these numbers.

use crate::case::Case;
use crate::compare::{Precision, assert_close};
use crate::dense::{Dense, Layout};
use crate::devices::devices;
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::CausalAlignment;
use burn::tensor::{DType, Device};

#[test]
fn lengths_around_tile_sizes_match_reference() {
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
fn lengths_around_tile_sizes_with_causal_mask_match_reference() {
    for (q_len, kv_len) in [(2, 2), (33, 33), (64, 65), (65, 64), (128, 129), (3, 127)] {
        Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([1, 1, 1, q_len, kv_len, 32, 32])
        }
        .check();
    }
}

/// Checks sequences that are so long that one loop over all keys would exceed a software driver's limit of iterations.
#[test]
fn lengths_of_more_than_a_thousand_match_reference() {
    Case::new([2, 1, 1, 1500, 1300, 16, 16]).check();
}

const LENGTHS: [i64; 6] = [0, 1, 63, 64, 70, 101];

/// Returns two sets of inputs for `case`. In the first set, keys past each sequence's length are NaN, and their values are
/// infinite. In the second set, these keys and values are finite.
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
fn kv_lengths_hide_nan_in_prefill() {
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
fn kv_lengths_hide_nan_in_decode() {
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
fn kv_lengths_beyond_the_keys_are_clamped() {
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

/// Checks that a sequence with a length gives the same results as a sequence that is trimmed to that length.
#[test]
fn kv_lengths_equal_trimmed_sequences() {
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
                // The slice holds the results of one sequence. The case has one key head, so the gradients of the trimmed
                // keys are the first rows of the slice.
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
fn slice_surroundings_of_nan_are_not_read() {
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
