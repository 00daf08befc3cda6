//! Tests of queries that see no key. Such a query has an output of 0, a logsumexp of −∞ (or its sink), and gradients of 0.
//! NaN in such a query, or in the gradient of its output, changes no other result.

use crate::case::{Case, FULL};
use crate::dense::{Dense, read};
use crate::devices::devices;
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::AttentionOptions;
use attention_cube::CausalAlignment::{BottomRight, TopLeft};
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Checks that queries that see no key may hold NaN. `blind` selects these queries. The devices get NaN in these
/// queries and in the gradients of their outputs, and the reference gets `clean`.
fn check_blind(case: &Case, clean: &Inputs, blind: impl Fn([usize; 3]) -> bool) {
    case.check_inputs(clean, clean);
    let mut given = clean.clone();
    given.query.fill_rows(f64::NAN, &blind);
    given.output_gradient.fill_rows(f64::NAN, &blind);
    case.check_inputs(&given, clean);
}

fn case(q_len: usize, kv_len: usize) -> Case {
    Case::new([2, 2, 1, q_len, kv_len, 32, 32])
}

#[test]
fn empty_row_by_mask_ignores_nan() {
    for q_len in [70, 3] {
        let case = Case {
            mask: Some([true, true, true, false]),
            ..case(q_len, 66)
        };
        let inputs = case.inputs();
        let mask = inputs.mask.clone().expect("the case has a mask");
        check_blind(&case, &inputs, |[b, h, i]| mask.at([b, h, i, 0]) == 0.0);
    }
}

#[test]
fn empty_row_by_length_zero_ignores_nan() {
    for q_len in [70, 3] {
        let case = Case {
            kv_lengths: Some(vec![0, 50]),
            ..case(q_len, 66)
        };
        check_blind(&case, &case.inputs(), |[batch, _, _]| batch == 0);
    }
}

/// Checks a batch in which every sequence has a length of 0, so that no query sees a key.
#[test]
fn empty_row_by_all_lengths_zero_with_sinks_ignores_nan() {
    for q_len in [70, 3] {
        let case = Case {
            kv_lengths: Some(vec![0, 0]),
            sinks: true,
            ..case(q_len, 66)
        };
        check_blind(&case, &case.inputs(), |_| true);
    }
}

#[test]
fn empty_row_by_causal_mask_ignores_nan() {
    let case = Case {
        causal: Some(BottomRight),
        ..case(150, 66)
    };
    check_blind(&case, &case.inputs(), |[_, _, query]| query < 150 - 66);
}

#[test]
fn empty_row_by_causal_mask_with_lengths_ignores_nan() {
    let case = Case {
        causal: Some(BottomRight),
        kv_lengths: Some(vec![10, 66]),
        ..case(100, 66)
    };
    let lengths = [10, 66];
    check_blind(&case, &case.inputs(), |[batch, _, query]| {
        query < 100 - lengths[batch]
    });
}

#[test]
fn empty_row_by_window_past_the_end_ignores_nan() {
    let case = Case {
        causal: Some(TopLeft),
        window: (Some(9), None),
        ..case(150, 66)
    };
    check_blind(&case, &case.inputs(), |[_, _, query]| query >= 66 + 9);
}

/// Checks a bias with one value per head, which hides all keys from one head.
#[test]
fn empty_row_by_bias_of_a_head_ignores_nan() {
    for q_len in [70, 3] {
        let case = Case {
            bias: Some([false, true, false, false]),
            causal: Some(BottomRight),
            ..case(q_len, 66)
        };
        let mut inputs = case.inputs();
        let bias = inputs.bias.as_mut().expect("the case has a bias");
        bias.values[1] = f64::NEG_INFINITY;
        check_blind(&case, &inputs, |[_, head, query]| {
            head == 1 || query + 66 < q_len
        });
    }
}

#[test]
fn empty_row_by_unmatched_segment_ignores_nan() {
    let ids = |length: usize, other: i64| -> Vec<i64> {
        (0..2 * length as i64)
            .map(|token| if token % 7 == 3 { other } else { 1 })
            .collect()
    };
    for q_len in [70, 3] {
        let case = Case {
            segments: Some((ids(q_len, 5), ids(66, -5))),
            ..case(q_len, 66)
        };
        check_blind(&case, &case.inputs(), |[b, _, i]| (b * q_len + i) % 7 == 3);
    }
}

/// Checks queries that see no key in a call with sinks. The logsumexp of such a query equals the sink, and the sink gets the
/// gradient of that logsumexp.
#[test]
fn empty_row_with_sinks_ignores_nan() {
    let masked = Case {
        mask: Some([true, true, true, false]),
        sinks: true,
        ..case(150, 66)
    };
    let inputs = masked.inputs();
    let mask = inputs.mask.clone().expect("the case has a mask");
    check_blind(&masked, &inputs, |[b, h, i]| mask.at([b, h, i, 0]) == 0.0);

    let causal = Case {
        causal: Some(BottomRight),
        sinks: true,
        ..case(150, 66)
    };
    check_blind(&causal, &causal.inputs(), |[_, _, query]| query < 150 - 66);
}

/// Checks that a sink of −∞ has the same effect as no sink. A query that sees no key then has an output of 0 and a
/// logsumexp of −∞.
#[test]
fn empty_row_with_sink_of_minus_infinity_ignores_nan() {
    for q_len in [150, 2] {
        let masked = Case {
            mask: Some([true, true, true, false]),
            sinks: true,
            ..case(q_len, 66)
        };
        let mut inputs = masked.inputs();
        let sinks = inputs.sinks.as_mut().expect("the case has sinks");
        sinks.values[1] = f64::NEG_INFINITY;
        let mask = inputs.mask.as_mut().expect("the case has a mask");
        // The mask hides all keys from every other query.
        for (index, visible) in mask.values.iter_mut().enumerate() {
            *visible = f64::from(index % 2 == 0);
        }
        let mask = mask.clone();
        check_blind(&masked, &inputs, |[b, h, i]| mask.at([b, h, i, 0]) == 0.0);
    }
}

/// Checks the gradient of a sink of −∞ whose query sees no key. The sink's gradient is 0, even if the gradient of the
/// logsumexp is NaN.
#[test]
fn sink_of_minus_infinity_without_keys_has_zero_gradient() {
    for device in devices() {
        let on = &device.device.clone().autodiff();
        let numbers = |values: [f32; 2]| {
            Tensor::<1>::from_data(TensorData::new(values.to_vec(), [2]), (on, DType::F32))
        };
        let operand = |length| Tensor::<4>::ones([1, 2, length, 16], (on, DType::F32));
        for operator in [Operator::Fused, Operator::Reference] {
            for weight in [1.0, f32::NAN] {
                let context = format!("{}, {operator:?}, {weight}", device.name);
                let sinks = numbers([f32::NEG_INFINITY, 0.5]).require_grad();
                let options = AttentionOptions::new().sinks(sinks.clone());
                let (_, lse) = operator
                    .call(operand(3), operand(0), operand(0), options)
                    .unwrap_or_else(|error| panic!("{context}: {error}"));
                let weights = numbers([weight, 1.0]).reshape([1, 2, 1]);
                let gradient = sinks.grad(&(lse * weights).sum().backward());
                let gradient = gradient.unwrap_or_else(|| panic!("{context}: no gradient"));
                assert_eq!(read(gradient), [0.0, 3.0], "{context}");
            }
        }
    }
}

/// Checks calls in which some keys and their values are NaN. Some queries see no key, and all other queries see NaN. A
/// query that sees no key must have an output of 0, a gradient of 0, and a logsumexp of −∞ or its sink.
pub(crate) fn check_beside_nan(sizes: [usize; 7], dtype: DType, sinks: bool) {
    let [_, q_heads, _, q_len, _, head_dim, value_dim] = sizes;
    let case = Case {
        dtype,
        mask: Some([false, false, true, false]),
        sinks,
        ..Case::new(sizes)
    };
    let is_blind = |query: usize| query % 2 == 1;
    let mut inputs = case.inputs();
    inputs.mask = Some(Dense::from_fn([1, 1, q_len, 1], |[_, _, query, _]| {
        f64::from(!is_blind(query))
    }));
    for operand in [&mut inputs.key, &mut inputs.value] {
        operand.fill_rows(f64::NAN, |[_, _, key]| key % 64 == 3);
    }
    for device in devices().iter().filter(|device| device.supports(dtype)) {
        let results = case.run(&inputs, &device.device, dtype, Operator::Fused);
        for (name, columns) in [
            ("output", value_dim),
            ("logsumexp", 1),
            ("query gradient", head_dim),
        ] {
            let result = results.iter().find(|result| result.name == name);
            let result = result.unwrap_or_else(|| panic!("no {name}"));
            for (row, values) in result.values.chunks(columns).enumerate() {
                let expected = match (name, &inputs.sinks) {
                    ("logsumexp", Some(sinks)) => sinks.values[row / q_len % q_heads],
                    ("logsumexp", None) => f64::NEG_INFINITY,
                    _ => 0.0,
                };
                assert!(
                    !is_blind(row % q_len) || values.iter().all(|x| *x == expected),
                    "{}: row {row} of {name} of {case:?} is {values:?}",
                    device.name
                );
            }
        }
    }
}

/// Checks tiles in which some queries see no key and others see NaN. In the case with 2000 keys, split-KV divides the keys,
/// and such tiles occur in every split.
#[test]
fn empty_row_beside_rows_that_see_nan_is_zero() {
    for (q_len, kv_len, width) in [(70, 66, 32), (2, 66, 32), (2, 2000, 64), (70, 66, 100)] {
        for (dtype, sinks) in [
            (DType::F32, false),
            (DType::F32, true),
            (DType::F16, true),
            (DType::BF16, true),
        ] {
            check_beside_nan([1, 2, 1, q_len, kv_len, width, width], dtype, sinks);
        }
    }
}

#[test]
fn empty_row_all_rows_masked_ignores_nan() {
    for q_len in [70, 1] {
        let case = Case {
            mask: Some(FULL),
            bias: Some(FULL),
            ..case(q_len, 66)
        };
        let mut inputs = case.inputs();
        if let Some(mask) = &mut inputs.mask {
            mask.values.fill(0.0);
        }
        check_blind(&case, &inputs, |_| true);
    }
}

/// Checks the reference in a call without keys or without queries. The gradient of the query tensor must have the shape
/// of that tensor. All elements of the gradient must be 0, even if the query is NaN.
#[test]
fn reference_without_elements_has_zero_gradient() {
    let on = &Device::flex().autodiff();
    for (q_len, kv_len) in [(2, 0), (0, 3), (0, 0)] {
        let operand = |length, number: f32| {
            Tensor::<4>::full([1, 1, length, 8], number, (on, DType::F32)).require_grad()
        };
        let query = operand(q_len, f32::NAN);
        let options = AttentionOptions::new();
        let (output, _) = Operator::Reference
            .call(
                query.clone(),
                operand(kv_len, 1.0),
                operand(kv_len, 1.0),
                options,
            )
            .unwrap_or_else(|error| panic!("{q_len}, {kv_len}: {error}"));
        assert!(read(output.clone().inner()).iter().all(|x| *x == 0.0));
        let gradient = query.grad(&(output * f32::NAN).sum().backward());
        let gradient = gradient.unwrap_or_else(|| panic!("{q_len}, {kv_len}: no gradient"));
        assert_eq!(gradient.dims(), query.dims());
        assert!(
            read(gradient).iter().all(|x| *x == 0.0),
            "{q_len}, {kv_len}"
        );
    }
}
