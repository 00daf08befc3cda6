//! Tests of `query_lengths`: sequences with different numbers of queries in one call (ragged queries). Query rows past
//! the end of a sequence see no key, and may hold NaN. For all other rows, the results must be the same as in a call
//! with the sequence alone.

use crate::case::{Case, FULL};
use crate::dense::{Dense, Layout};
use crate::inputs::Inputs;
use attention_cube::CausalAlignment::{BottomRight, TopLeft};
use burn::tensor::DType;

/// Checks the case with NaN in all rows that must not affect the results. Such rows exist in queries, output gradients,
/// keys and values. The reference gets inputs without NaN.
fn check(case: Case) {
    let clean = case.inputs();
    case.check_inputs(&poisoned(&case, &clean), &clean);
}

fn poisoned(case: &Case, clean: &Inputs) -> Inputs {
    let unused = case.unused(clean);
    let mut given = clean.clone();
    let query = |[b, h, i]: [usize; 3]| unused.queries[(b * case.q_heads + h) * case.q_len + i];
    let key = |[b, h, j]: [usize; 3]| unused.keys[(b * case.kv_heads + h) * case.kv_len + j];
    given.query.fill_rows(f64::NAN, query);
    given.output_gradient.fill_rows(f64::NAN, query);
    given.key.fill_rows(f64::NAN, key);
    given.value.fill_rows(f64::NAN, key);
    given
}

fn plain(q_len: usize, kv_len: usize, width: usize) -> Case {
    Case {
        causal: Some(BottomRight),
        ..Case::new([4, 4, 2, q_len, kv_len, width, width])
    }
}

#[test]
fn ragged_prompts_match_reference() {
    for width in [32, 80] {
        check(Case {
            query_lengths: Some(vec![150, 1, 0, 77]),
            ..plain(150, 150, width)
        });
    }
}

#[test]
fn ragged_prompts_beside_single_tokens_match_reference() {
    // The first sequence has a prompt chunk of 90 queries. The next two sequences have a single query each, and the last
    // sequence has three drafted tokens. The KV lengths of the sequences differ.
    check(Case {
        query_lengths: Some(vec![90, 1, 1, 3]),
        kv_lengths: Some(vec![140, 200, 1, 63]),
        ..plain(90, 200, 32)
    });
}

#[test]
fn ragged_decode_matches_reference() {
    // The cases have few rows and many keys. The heads of a GQA group therefore share a tile, and the keys are split over
    // cubes (split-KV).
    for (group, width) in [(1, 32), (4, 64), (8, 32)] {
        check(Case {
            q_heads: group,
            kv_heads: 1,
            query_lengths: Some(vec![3, 1, 0, 2]),
            kv_lengths: Some(vec![1500, 700, 1200, 40]),
            ..plain(3, 1500, width)
        });
    }
}

#[test]
fn ragged_queries_with_each_option_match_reference() {
    let ragged = Case {
        query_lengths: Some(vec![70, 5, 33, 64]),
        ..plain(70, 90, 32)
    };
    let ids = |length: usize| (0..4 * length).map(move |token| (token % length / 30) as i64);
    let interval = (0..4 * 70).map(|i: i64| (i % 7, i % 70 + 25)).unzip();
    for case in [
        Case {
            causal: None,
            ..ragged.clone()
        },
        Case {
            causal: Some(TopLeft),
            window: (Some(20), None),
            ..ragged.clone()
        },
        Case {
            causal: None,
            window: (Some(11), Some(6)),
            ..ragged.clone()
        },
        Case {
            mask: Some(FULL),
            bias: Some(FULL),
            ..ragged.clone()
        },
        Case {
            bias: Some([false, true, false, false]),
            sinks: true,
            softcap: Some(3.0),
            ..ragged.clone()
        },
        Case {
            segments: Some((ids(70).collect(), ids(90).collect())),
            ..ragged.clone()
        },
        Case {
            causal: None,
            intervals: vec![interval],
            ..ragged.clone()
        },
    ] {
        check(case);
    }
}

#[test]
fn ragged_lengths_of_any_number_are_clamped() {
    check(Case {
        query_lengths: Some(vec![-5, 41, i64::MAX, i64::MIN]),
        kv_lengths: Some(vec![50, i64::MAX, -1, 50]),
        ..plain(40, 50, 32)
    });
    check(Case {
        query_lengths: Some(vec![17]),
        expanded: true,
        ..plain(40, 50, 32)
    });
}

#[test]
fn ragged_queries_in_half_precision_match_reference() {
    for dtype in [DType::F16, DType::BF16] {
        for layout in [Layout::Contiguous, Layout::HeadsLast] {
            check(Case {
                dtype,
                layouts: [layout; 4],
                query_lengths: Some(vec![130, 1, 64, 65]),
                kv_lengths: Some(vec![130, 190, 64, 3]),
                ..plain(130, 190, 64)
            });
        }
    }
}

/// Checks that a sequence's results do not depend on the other sequences of the batch. The bits of the results must
/// stay the same if all other sequences have no queries.
#[test]
fn ragged_sequence_is_independent_of_the_others() {
    let lengths = [50, 3, 0, 21];
    let case = Case {
        query_lengths: Some(lengths.to_vec()),
        kv_lengths: Some(vec![60, 70, 80, 21]),
        ..plain(50, 80, 32)
    };
    let inputs = case.inputs();
    for device in crate::devices::devices() {
        let run = |inputs: &Inputs| {
            case.run(
                inputs,
                &device.device,
                case.dtype,
                crate::run::Operator::Fused,
            )
        };
        let together = run(&inputs);
        for (alone, own) in lengths.iter().enumerate() {
            let only = (0..4).map(|b| if b == alone { *own } else { 0 }).collect();
            let given = Inputs {
                query_lengths: Some(only),
                ..inputs.clone()
            };
            let found = run(&given);
            let size = case.q_heads * case.q_len * case.value_dim;
            let part = |values: &[f64]| Dense {
                shape: [case.q_heads, case.q_len, case.value_dim, 1],
                values: values[alone * size..][..size].to_vec(),
            };
            assert_eq!(
                part(&found[0].values),
                part(&together[0].values),
                "{} {alone}",
                device.name
            );
        }
    }
}
