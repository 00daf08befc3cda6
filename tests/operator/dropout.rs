//! Tests of dropout. In the forward and in the backward, kernels must drop the same probabilities as the reference, which draws
//! its random bits on the host.

use crate::case::{Case, FULL};
use crate::dense::{Layout, host};
use crate::devices::devices;
use crate::run::Operator;
use attention_cube::CausalAlignment::BottomRight;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{DType, Tensor};

const SEED: u64 = 0x1234_5678_9ABC_DEF1;

fn plain(q_len: usize, kv_len: usize, width: usize) -> Case {
    Case {
        dropout: Some((0.3, SEED)),
        ..Case::new([2, 4, 2, q_len, kv_len, width, width])
    }
}

#[test]
fn dropout_of_prompts_matches_reference() {
    for (q_len, kv_len, width) in [(70, 90, 32), (150, 150, 80), (33, 200, 5)] {
        plain(q_len, kv_len, width).check();
    }
}

#[test]
fn dropout_of_few_rows_matches_reference() {
    // The cases have few query rows and 1300 keys. All query heads of a GQA group therefore share a tile, and the keys
    // are split over cubes (split-KV).
    for (group, q_len) in [(1, 1), (4, 3), (5, 2), (8, 4)] {
        Case {
            q_heads: group,
            kv_heads: 1,
            causal: Some(BottomRight),
            ..plain(q_len, 1300, 32)
        }
        .check();
    }
}

#[test]
fn dropout_with_each_option_matches_reference() {
    let case = Case {
        causal: Some(BottomRight),
        ..plain(70, 90, 32)
    };
    for case in [
        Case {
            mask: Some(FULL),
            bias: Some(FULL),
            ..case.clone()
        },
        Case {
            bias: Some([false, true, false, false]),
            sinks: true,
            softcap: Some(3.0),
            ..case.clone()
        },
        Case {
            window: (Some(20), Some(0)),
            kv_lengths: Some(vec![80, 33]),
            query_lengths: Some(vec![50, 70]),
            ..case.clone()
        },
        Case {
            dropout: Some((0.99, SEED)),
            layouts: [Layout::HeadsLast; 4],
            ..case.clone()
        },
    ] {
        case.check();
    }
}

#[test]
fn dropout_in_half_precision_matches_reference() {
    for dtype in [DType::F16, DType::BF16] {
        for width in [64, 128] {
            Case {
                dtype,
                causal: Some(BottomRight),
                ..plain(150, 190, width)
            }
            .check();
        }
    }
}

/// Checks queries that see few keys of a tile, so that dropout may drop all probabilities of a query in the tile. Such
/// a query still contributes to the gradients of these keys. The gradient of a dropped score is w (0 − Δ), where w is
/// the probability before dropout. Δ is the dot product of the query's output and the gradient of this output.
#[test]
fn dropout_of_all_keys_that_a_query_sees_matches_reference() {
    let ids: Vec<i64> = (0..280).map(|token| token / 50).collect();
    for dtype in [DType::F32, DType::BF16] {
        for width in [80, 256] {
            Case {
                dtype,
                dropout: Some((0.7, SEED)),
                causal: Some(BottomRight),
                window: (Some(3), Some(0)),
                segments: Some((ids.clone(), ids.clone())),
                ..plain(140, 140, width)
            }
            .check();
        }
    }
}

/// Checks dropout so high that the probabilities P could overflow in f16. In f16, the backward stores P times 4096.
/// Dropout multiplies each kept probability by about 100. The first queries see few keys, so their probabilities are
/// near 1, and 100 · 4096 exceeds 65504, the largest f16 number.
#[test]
fn dropout_of_most_probabilities_stays_finite_in_half_precision() {
    for dtype in [DType::F16, DType::BF16] {
        for (q_len, width) in [(70, 64), (40, 320)] {
            Case {
                dtype,
                dropout: Some((0.99, SEED)),
                causal: Some(BottomRight),
                ..plain(q_len, q_len, width)
            }
            .check();
        }
    }
}

/// Checks wide heads, for which each warp of a CTA computes only some of the output columns.
#[test]
fn dropout_of_wide_heads_matches_reference() {
    for dtype in [DType::F32, DType::BF16] {
        for width in [256, 512] {
            Case {
                dtype,
                causal: Some(BottomRight),
                ..Case {
                    batch: 1,
                    q_heads: 2,
                    kv_heads: 1,
                    ..plain(70, 90, width)
                }
            }
            .check();
        }
    }
}

/// Checks the share of dropped probabilities. All scores are equal and all values are 1. An output is therefore the
/// share of kept probabilities times the factor by which dropout scales these probabilities.
#[test]
fn dropout_drops_the_given_share() {
    let (queries, keys) = (128, 256);
    for device in devices() {
        let zeros = |length| Tensor::<4>::zeros([1, 2, length, 8], &device.device);
        let ones = Tensor::<4>::ones([1, 2, keys, 8], &device.device);
        for probability in [0.1, 0.5, 0.9] {
            let options = AttentionOptions::new().dropout(probability, SEED);
            let output = fused_attention(zeros(queries), zeros(keys), ones.clone(), options);
            let values = host(output.into_data());
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let count = (2 * queries * keys) as f64;
            let deviation = (probability / (1.0 - probability) / count).sqrt();
            assert!(
                (mean - 1.0).abs() < 5.0 * deviation,
                "{} {probability}: {mean}, deviation {deviation}",
                device.name
            );
        }
    }
}

#[test]
fn dropout_repeats_with_its_seed_and_changes_with_it() {
    let case = plain(40, 60, 32);
    let inputs = case.inputs();
    for device in devices() {
        let run = |dropout| {
            let case = Case {
                dropout,
                ..case.clone()
            };
            let results = case.run(&inputs, &device.device, case.dtype, Operator::Fused);
            results
                .into_iter()
                .map(|named| named.values)
                .collect::<Vec<_>>()
        };
        let own = run(Some((0.3, SEED)));
        assert_eq!(own, run(Some((0.3, SEED))), "{}", device.name);
        assert_ne!(own, run(Some((0.3, SEED + 1))), "{}", device.name);
        assert_ne!(own, run(Some((0.3, SEED + (1 << 32)))), "{}", device.name);
        assert_eq!(run(Some((0.0, SEED))), run(None), "{}", device.name);
    }
}
