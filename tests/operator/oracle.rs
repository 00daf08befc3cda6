//! The oracle itself: the reference's forward against loops written from the contract, and its gradients
//! against finite differences of those loops.

use crate::case::{Case, FULL};
use crate::inputs::Inputs;
use crate::run::Operator;
use attention_cube::CausalAlignment::{self, BottomRight, TopLeft};
use burn::tensor::{DType, Device};

/// Whether query `i` sees key `j`.
fn sees(case: &Case, inputs: &Inputs, [b, h, i, j]: [usize; 4]) -> bool {
    let length = match &inputs.kv_lengths {
        Some(lengths) => lengths[b].clamp(0, case.kv_len as i64),
        None => case.kv_len as i64,
    };
    let alignment = case.causal.unwrap_or_default();
    let offset = if alignment == BottomRight {
        length - case.q_len as i64
    } else {
        0
    };
    let (position, key) = (i as i64 + offset, j as i64);
    let (left, right) = case.window;
    key < length
        && (case.causal.is_none() || key <= position)
        && left.is_none_or(|left| key >= position - left as i64)
        && right.is_none_or(|right| key <= position + right as i64)
        && inputs
            .mask
            .as_ref()
            .is_none_or(|mask| mask.at([b, h, i, j]) != 0.0)
        && inputs
            .segments
            .as_ref()
            .is_none_or(|(queries, keys)| queries[b * case.q_len + i] == keys[b * case.kv_len + j])
}

/// Output and logsumexp.
fn by_loops(case: &Case, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let (mut output, mut logsumexp) = (Vec::new(), Vec::new());
    let group = case.q_heads / case.kv_heads;
    let scale = case.scale.unwrap_or(1.0 / (case.head_dim as f64).sqrt());
    for row in 0..case.batch * case.q_heads * case.q_len {
        let i = row % case.q_len;
        let h = row / case.q_len % case.q_heads;
        let b = row / case.q_len / case.q_heads;
        let score = |j: usize| {
            let dot: f64 = (0..case.head_dim)
                .map(|c| inputs.query.at([b, h, i, c]) * inputs.key.at([b, h / group, j, c]))
                .sum();
            let scaled = dot * scale;
            let capped = case
                .softcap
                .map_or(scaled, |cap| cap * (scaled / cap).tanh());
            capped
                + inputs
                    .bias
                    .as_ref()
                    .map_or(0.0, |bias| bias.at([b, h, i, j]))
        };
        let seen: Vec<(usize, f64)> = (0..case.kv_len)
            .filter(|j| sees(case, inputs, [b, h, i, *j]))
            .map(|j| (j, score(j)))
            .collect();
        let mut sum: f64 = seen.iter().map(|(_, score)| score.exp()).sum();
        if let Some(sinks) = &inputs.sinks {
            sum += sinks.at([0, h, 0, 0]).exp();
        }
        logsumexp.push(sum.ln());
        for c in 0..case.value_dim {
            let weighted: f64 = seen
                .iter()
                .map(|(j, score)| score.exp() * inputs.value.at([b, h / group, *j, c]))
                .sum();
            output.push(if seen.is_empty() { 0.0 } else { weighted / sum });
        }
    }
    (output, logsumexp)
}

fn loss(case: &Case, inputs: &Inputs) -> f64 {
    let (output, logsumexp) = by_loops(case, inputs);
    let dot = |a: &[f64], b: &[f64]| -> f64 {
        a.iter()
            .zip(b)
            .filter(|(a, _)| a.is_finite())
            .map(|(a, b)| a * b)
            .sum()
    };
    let of_lse = inputs
        .lse_gradient
        .as_ref()
        .map_or(0.0, |weights| dot(&logsumexp, &weights.values));
    dot(&output, &inputs.output_gradient.values) + of_lse
}

/// Central differences by every element of the part that `part` picks.
fn differences(
    case: &Case,
    inputs: &Inputs,
    part: impl Fn(&mut Inputs) -> Option<&mut Vec<f64>>,
) -> Option<Vec<f64>> {
    const STEP: f64 = 1e-5;
    let mut moved = inputs.clone();
    let count = part(&mut moved)?.len();
    let mut at = |index: usize, step: f64| {
        let values = part(&mut moved).expect("it was there before");
        let original = values[index];
        values[index] += step;
        let loss = loss(case, &moved);
        part(&mut moved).expect("it was there before")[index] = original;
        loss
    };
    Some(
        (0..count)
            .map(|index| (at(index, STEP) - at(index, -STEP)) / (2.0 * STEP))
            .collect(),
    )
}

#[track_caller]
fn assert_near(context: &str, got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{context}");
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        let near = got == expected || (got - expected).abs() <= tolerance * (1.0 + expected.abs());
        assert!(near, "{context}[{index}]: {got} instead of {expected}");
    }
}

/// Small problems that use every option.
fn cases() -> Vec<Case> {
    let plain = Case {
        dtype: DType::F64,
        ..Case::new([2, 4, 2, 3, 5, 3, 2])
    };
    let tall = Case {
        q_len: 6,
        ..plain.clone()
    };
    let causal = |alignment: CausalAlignment, case: &Case| Case {
        causal: Some(alignment),
        ..case.clone()
    };
    let segments = Some((
        vec![1, 2, 2, -4, 1, 9],
        vec![1, 1, 2, 2, 7, 0, 1, 1, -4, -4],
    ));
    vec![
        plain.clone(),
        causal(BottomRight, &plain),
        causal(TopLeft, &plain),
        causal(BottomRight, &tall),
        causal(TopLeft, &tall),
        Case {
            window: (Some(1), Some(0)),
            ..plain.clone()
        },
        Case {
            window: (None, Some(1)),
            ..tall.clone()
        },
        Case {
            window: (Some(0), None),
            causal: Some(TopLeft),
            ..tall.clone()
        },
        Case {
            mask: Some([true, false, true, true]),
            ..plain.clone()
        },
        Case {
            mask: Some([false, true, true, false]),
            sinks: true,
            ..plain.clone()
        },
        Case {
            bias: Some(FULL),
            softcap: Some(0.8),
            ..plain.clone()
        },
        Case {
            bias: Some([false, true, false, true]),
            scale: Some(1.0),
            ..plain.clone()
        },
        Case {
            kv_lengths: Some(vec![0, 4]),
            ..causal(BottomRight, &plain)
        },
        Case {
            kv_lengths: Some(vec![3, 9]),
            sinks: true,
            ..causal(BottomRight, &tall)
        },
        Case {
            segments,
            sinks: true,
            ..plain.clone()
        },
        Case {
            lse_gradient: false,
            sinks: true,
            bias: Some([true; 4]),
            ..plain
        },
    ]
}

#[test]
fn the_reference_is_the_contract() {
    for case in cases() {
        let inputs = case.inputs();
        let (output, logsumexp) = by_loops(&case, &inputs);
        let got = case.run(&inputs, &Device::flex(), DType::F64, Operator::Reference);
        assert_near(
            &format!("output of {case:?}"),
            &got[0].values,
            &output,
            1e-12,
        );
        assert_near(
            &format!("logsumexp of {case:?}"),
            &got[1].values,
            &logsumexp,
            1e-12,
        );
    }
}

#[test]
fn gradients_are_finite_differences() {
    for case in cases() {
        let inputs = case.inputs();
        let expected = [
            (
                "query gradient",
                differences(&case, &inputs, |i| Some(&mut i.query.values)),
            ),
            (
                "key gradient",
                differences(&case, &inputs, |i| Some(&mut i.key.values)),
            ),
            (
                "value gradient",
                differences(&case, &inputs, |i| Some(&mut i.value.values)),
            ),
            (
                "bias gradient",
                differences(&case, &inputs, |i| {
                    i.bias.as_mut().map(|bias| &mut bias.values)
                }),
            ),
            (
                "sinks gradient",
                differences(&case, &inputs, |i| {
                    i.sinks.as_mut().map(|sinks| &mut sinks.values)
                }),
            ),
        ];
        // By autodiff through the definition, and by the explicit backward.
        for operator in [Operator::Reference, Operator::Fused] {
            let got = case.run(&inputs, &Device::flex(), DType::F64, operator);
            for (name, expected) in &expected {
                let got = got.iter().find(|named| named.name == *name);
                let context = format!("{name} of {operator:?} {case:?}");
                match (got, expected) {
                    (Some(got), Some(expected)) => {
                        assert_near(&context, &got.values, expected, 1e-7);
                    }
                    (None, None) => {}
                    _ => panic!("{context} exists on one side alone"),
                }
            }
        }
    }
}
