//! Tests of the reference itself. Its forward is compared with plain loops that follow the definition of the operator.
//! Its gradients are compared with finite differences of these loops.

use crate::case::{Case, FULL};
use crate::dense::Layout;
use crate::inputs::Inputs;
use crate::random::{Problem, Sizes, numbered};
use crate::run::Operator;
use attention_cube::CausalAlignment::{self, BottomRight, TopLeft};
use burn::tensor::{DType, Device, f16};
use proptest::strategy::ValueTree;
use proptest::test_runner::Config;
use std::iter;

/// Returns the output and the logsumexp, computed by plain loops over queries and keys.
fn by_loops(case: &Case, inputs: &Inputs) -> (Vec<f64>, Vec<f64>) {
    let (mut output, mut logsumexp) = (Vec::new(), Vec::new());
    let group = case.q_heads / case.kv_heads;
    let scale = case.scale.unwrap_or(1.0 / (case.head_dim as f64).sqrt());
    let dropout = case
        .dropout
        .map(|(probability, seed)| (Drops::of(probability), seed));
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
            case.changed(capped, [b, h, i, j], case.offset(inputs, b))
                + inputs
                    .bias
                    .as_ref()
                    .map_or(0.0, |bias| bias.at([b, h, i, j]))
        };
        let seen: Vec<(usize, f64)> = (0..case.kv_len)
            .filter(|j| case.sees(inputs, [b, h, i, *j]))
            .map(|j| (j, score(j)))
            .collect();
        let sink = inputs.sinks.as_ref().map(|sinks| sinks.at([0, h, 0, 0]));
        let all = seen.iter().map(|(_, score)| *score).chain(sink);
        // The largest score is subtracted from all scores, so that the exponentials do not overflow.
        let reference = all.clone().fold(f64::NEG_INFINITY, f64::max);
        if reference == f64::NEG_INFINITY {
            logsumexp.push(reference);
            output.extend(iter::repeat_n(0.0, case.value_dim));
            continue;
        }
        let sum: f64 = all.map(|score| (score - reference).exp()).sum();
        let keep = |j: usize| {
            dropout.as_ref().map_or(1.0, |(drops, seed)| {
                keep_factor(drops, *seed, row / case.q_len, [i, j])
            })
        };
        logsumexp.push(reference + sum.ln());
        for c in 0..case.value_dim {
            let weighted: f64 = seen
                .iter()
                .map(|(j, score)| {
                    let value = inputs.value.at([b, h / group, *j, c]);
                    keep(*j) * (score - reference).exp() * value
                })
                .sum();
            output.push(weighted / sum);
        }
    }
    (output, logsumexp)
}

/// Returns the factor by which dropout multiplies one attention probability. `at` holds the index of the query and the
/// index of the key. The factor of a dropped probability is 0. `plane` is the index of the query head among all heads
/// of all sequences.
fn keep_factor(drops: &Drops, seed: u64, plane: usize, at: [usize; 2]) -> f64 {
    let generator = philox([plane as u32, (seed >> 32) as u32], seed as u32)[0];
    // A call of the generator gives two words for eight scores: the first word for query i, and the second word for
    // query i + 8. Each of the four bytes of a word is the high byte of the random number for one key. In the order of
    // the bytes, the keys are j + 8, j, j + 9 and j + 1, where j is even. The low byte is that of the key 8 positions
    // further, or for the later key the high byte of the other query's earlier key.
    let [query, key] = at;
    let of_query = (query / 16 * 8 + query % 8) as u32;
    let of_key = (key / 16 * 4 + key % 8 / 2) as u32;
    let mut words = philox([of_query, of_key], generator).map(u32::to_le_bytes);
    if query % 16 >= 8 {
        words.reverse();
    }
    let [own, other] = words.map(|bytes| [bytes[key % 2 * 2], bytes[key % 2 * 2 + 1]]);
    let bytes = match key % 16 < 8 {
        true => [own[1], own[0]],
        false => [own[0], other[1]],
    };
    let bits = f16::from_bits(u16::from_be_bytes(bytes));
    match (bits > drops.threshold) == drops.keeps_hits {
        true => drops.factor,
        false => 0.0,
    }
}

/// The rule by which dropout keeps or drops an attention probability. The rule reads 16 random bits as an f16 number.
/// If `keeps_hits` is true, a number above the threshold keeps the probability. Otherwise, such a number drops the
/// probability.
struct Drops {
    threshold: f16,
    keeps_hits: bool,
    factor: f64,
}

impl Drops {
    /// Returns the rule for a dropout probability. Normally, a number above the threshold drops an attention
    /// probability. NaN is above no threshold, so even the threshold −∞ keeps the attention probabilities whose number
    /// is NaN. If more must be dropped than the threshold −∞ drops, the rule is reversed: a number above the threshold
    /// keeps an attention probability.
    fn of(probability: f64) -> Self {
        let mut numbers: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        numbers.retain(|number| !number.is_nan());
        numbers.sort_by(|a, b| b.partial_cmp(a).expect("NaN is left out"));
        let above = |threshold: f16| numbers.partition_point(|number| *number > threshold);
        let dropped = (probability * 65536.0).round() as usize;
        let keeps_hits = dropped > above(f16::NEG_INFINITY);
        let wanted = if keeps_hits { 65536 - dropped } else { dropped };
        let threshold = *numbers
            .iter()
            .find(|threshold| above(**threshold) >= wanted)
            .expect("−∞ has enough numbers above it");
        let hits = above(threshold);
        let kept = if keeps_hits { hits } else { 65536 - hits };
        Self {
            threshold,
            keeps_hits,
            factor: 65536.0 / kept as f64,
        }
    }
}

/// Returns the two words of Philox 2x32 with 7 rounds. The loops do not use the operator's own generator, because the
/// test would then miss faults in that generator.
fn philox(counter: [u32; 2], mut key: u32) -> [u32; 2] {
    let [mut left, mut right] = counter;
    for _ in 0..7 {
        let product = u64::from(left) * 0xD256_D193;
        left = (product >> 32) as u32 ^ key ^ right;
        right = product as u32;
        key = key.wrapping_add(0x9E37_79B9);
    }
    [left, right]
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

/// Returns the gradient of the loss by central differences, for each element of the input that `part` selects. Returns
/// `None` if the case does not have that input.
fn differences(
    case: &Case,
    inputs: &Inputs,
    part: impl Fn(&mut Inputs) -> Option<&mut Vec<f64>>,
) -> Option<Vec<f64>> {
    const STEP: f64 = 1e-5;
    let mut moved = inputs.clone();
    let count = part(&mut moved)?.len();
    let mut at = |index: usize, step: f64| {
        let values = part(&mut moved).expect("the case has this input");
        let original = values[index];
        values[index] += step;
        let loss = loss(case, &moved);
        part(&mut moved).expect("the case has this input")[index] = original;
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
        let near = is_near(*got, *expected, tolerance);
        assert!(near, "{context}[{index}]: {got} instead of {expected}");
    }
}

fn is_near(got: f64, expected: f64, tolerance: f64) -> bool {
    got == expected || (got - expected).abs() <= tolerance * (1.0 + expected.abs())
}

/// Returns small problems. Each option occurs in at least one problem.
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
fn reference_forward_equals_loops() {
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

/// Checks the reference on random problems with all kinds of data that the operator permits. The forward must agree
/// with plain loops. The gradients by autodiff through the reference must agree with the gradients of the operator's
/// own backward.
#[test]
fn reference_on_random_problems_equals_loops_and_explicit_backward() {
    let mut faults = Vec::new();
    for number in 0..300 {
        let (_, tree) = numbered(Sizes::Small, number, Config::default());
        let Problem { case, data } = tree.current();
        let case = Case {
            dtype: DType::F64,
            layouts: [Layout::Contiguous; 4],
            ..case
        };
        let inputs = data.draw(&case).clean;
        let (output, logsumexp) = by_loops(&case, &inputs);
        let [definition, explicit] = [Operator::Reference, Operator::Fused]
            .map(|operator| case.run(&inputs, &Device::flex(), DType::F64, operator));
        let mut compare = |name, found: &[f64], expected: &[f64], tolerance| {
            let is_far = |(a, b): &(&f64, &f64)| !is_near(**a, **b, tolerance);
            let far = found.iter().zip(expected).filter(is_far).count();
            if far > 0 {
                let all = found.len();
                faults.push(format!(
                    "{number}: {far} of {all} of {name}: {case:?} {data:?}"
                ));
            }
        };
        // A score mod computes in f32, so its results need a larger tolerance.
        let tolerance = if case.score_mod.is_some() {
            1e-5
        } else {
            1e-11
        };
        compare("output", &definition[0].values, &output, tolerance);
        compare("logsumexp", &definition[1].values, &logsumexp, tolerance);
        for (explicit, definition) in explicit.iter().zip(&definition) {
            // The tolerance is 1e-6 instead of a few f64 roundings, because autodiff computes the division by a softcap
            // in f32.
            compare(explicit.name, &explicit.values, &definition.values, 1e-6);
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn reference_gradients_equal_finite_differences() {
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
        // [`Operator::Reference`] computes gradients by autodiff through the reference. [`Operator::Fused`] computes
        // gradients by the operator's own backward.
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
                    _ => panic!("{context} exists on only one side"),
                }
            }
        }
    }
}
