//! Tests of the mma engine's kernel that reads packed int8 directly, on the devices that support this kernel. The cases have
//! at most 32 rows. The head sizes are those of the tile table and sizes in between. Other cases cover split keys, all
//! options that hide keys, and views whose rows start at any address.

use super::case::{Quantized, Rows};
use super::causal;
use crate::case::{Case, FULL, seed};
use crate::dense::{Dense, Layout, read};
use crate::devices::{TestDevice, cube_devices};
use attention_cube::internals::device::Feature;
use attention_cube::internals::engine::Engine;
use attention_cube::quantized::{QuantizedRows, quantized_attention};
use attention_cube::{
    AttentionOptions, AttentionProblem, CausalAlignment, explain, fused_attention,
};
use burn::tensor::{DType, Tensor};
use rand::{SeedableRng, rngs::StdRng};

/// The tested pairs of `(head_dim, value_dim)`: every row of the tile table, and sizes between the rows. All sizes are
/// multiples of 16 codes.
const WIDTHS: [(usize, usize); 9] = [
    (48, 32),
    (64, 64),
    (80, 112),
    (128, 128),
    (144, 256),
    (256, 256),
    (272, 48),
    (512, 512),
    (576, 512),
];

fn matrix_unit_devices() -> Vec<TestDevice> {
    let has_engine = |device: &TestDevice| {
        let probe = Tensor::<4>::zeros([1; 4], (&device.device, DType::F32));
        let problem = AttentionProblem::new(&probe, &probe, &probe, &AttentionOptions::new());
        let profile = problem.map(|problem| explain(&problem, &device.device).device);
        profile.is_ok_and(|profile| {
            profile.is_some_and(|profile| {
                profile.features.contains(&Feature::LoadMatrix(DType::BF16))
                    && !profile.disabled_engines.contains(&Engine::Mma)
            })
        })
    };
    cube_devices().into_iter().filter(has_engine).collect()
}

/// Checks `case` in bf16, and asserts that the mma engine serves the case. `given` may change only hidden keys and values,
/// because the reference gets the original ones.
fn check_given(case: Case, given: impl Fn(&mut Rows, &mut Rows)) {
    let devices = matrix_unit_devices();
    if devices.is_empty() {
        return;
    }
    let quantized = Quantized::new(Case {
        dtype: DType::BF16,
        ..case
    });
    let (mut key, mut value) = (quantized.key.clone(), quantized.value.clone());
    given(&mut key, &mut value);
    for device in &devices {
        let explanation = quantized.explain_on(device);
        assert_eq!(
            explanation.forward.kernel.engine(),
            Engine::Mma,
            "{explanation}"
        );
    }
    quantized.check_on(&devices, &key, &value);
}

fn check(case: Case) {
    check_given(case, |_, _| {});
}

#[test]
fn int8_mma_head_dims_and_groups_match_reference() {
    for (head_dim, value_dim) in WIDTHS {
        check(causal([2, 4, 4, 1, 100, head_dim, value_dim]));
        check(causal([1, 8, 1, 2, 77, head_dim, value_dim]));
    }
}

#[test]
fn int8_mma_rows_of_two_fragments_match_reference() {
    for (head_dim, value_dim) in [(48, 32), (128, 128), (144, 64), (256, 256)] {
        check(causal([1, 8, 1, 4, 90, head_dim, value_dim]));
        check(causal([2, 4, 2, 9, 150, head_dim, value_dim]));
    }
}

/// Checks head sizes above 256, for which 17 to 32 rows are divided into two or three tiles of 16 rows. The rows are
/// query heads that share keys, or several queries of one head.
#[test]
fn int8_mma_wide_heads_with_several_tiles_match_reference() {
    for (head_dim, value_dim) in [(272, 48), (512, 512), (576, 512)] {
        check(causal([1, 8, 1, 4, 90, head_dim, value_dim]));
        check(causal([2, 6, 2, 9, 150, head_dim, value_dim]));
        check(Case {
            mask: Some(FULL),
            bias: Some([false, true, true, true]),
            sinks: true,
            window: (Some(40), Some(3)),
            ..Case::new([1, 2, 2, 20, 70, head_dim, value_dim])
        });
        check(Case {
            kv_lengths: Some(vec![0, 41]),
            ..causal([2, 17, 1, 1, 150, head_dim, value_dim])
        });
    }
}

/// Checks keys that are divided into many splits. The causal mask and the lengths leave some splits empty. Other cases
/// have fewer keys than a block.
#[test]
fn int8_mma_splits_and_lengths_match_reference() {
    for head_dim in [64, 256, 512] {
        check(Case {
            kv_lengths: Some(vec![0, 1, 1300]),
            sinks: true,
            ..causal([3, 8, 1, 1, 1300, head_dim, head_dim])
        });
        for kv_len in [1, 5, 16, 33] {
            check(causal([1, 2, 1, 1, kv_len, head_dim, head_dim]));
        }
    }
}

#[test]
fn int8_mma_every_option_matches_reference() {
    let ids = |length: i64| (0..2 * length).map(|i| i % length / 30).collect();
    for (head_dim, value_dim) in [(64, 64), (256, 256), (512, 512)] {
        let base = Case::new([2, 4, 2, 3, 150, head_dim, value_dim]);
        for case in [
            Case {
                window: (Some(30), Some(2)),
                softcap: Some(3.0),
                ..base.clone()
            },
            Case {
                mask: Some(FULL),
                bias: Some([false, true, true, true]),
                sinks: true,
                ..base.clone()
            },
            Case {
                mask: Some(FULL),
                kv_heads: 4,
                ..base.clone()
            },
            Case {
                bias: Some([false, true, false, false]),
                kv_lengths: Some(vec![0, 41]),
                ..base.clone()
            },
            Case {
                causal: Some(CausalAlignment::TopLeft),
                segments: Some((ids(3), ids(150))),
                ..base.clone()
            },
        ] {
            check(case);
        }
    }
}

/// Checks that keys and values past a sequence's length or outside of the window are not read. The scales of these keys and
/// values are NaN or infinite, and their codes are −128.
#[test]
fn int8_mma_hidden_scales_are_not_read() {
    for head_dim in [64, 256, 512] {
        let lengths = [0i64, 1, 33, 64, 100];
        for q_len in [1, 2] {
            let case = Case {
                kv_lengths: Some(lengths.to_vec()),
                window: (Some(20), None),
                ..causal([lengths.len(), 4, 1, q_len, 100, head_dim, head_dim])
            };
            check_given(case, |key, value| {
                let hidden = |[batch, _, key]: [usize; 3]| {
                    let (key, end) = (key as i64, lengths[batch]);
                    key >= end || key < end - 20 - q_len as i64
                };
                for rows in [&mut *key, &mut *value] {
                    rows.codes.fill_rows(-128.0, hidden);
                }
                key.scales.fill_rows(f64::NAN, hidden);
                value.scales.fill_rows(f64::INFINITY, hidden);
            });
        }
    }
}

/// Checks keys and values that are views of larger tensors, which have the order `[batch, length, heads, columns]` in memory.
/// The rows of the views start at multiples of 4 or of 16 bytes.
#[test]
fn int8_mma_views_match_dequantized_attention() {
    for TestDevice { name, device } in matrix_unit_devices() {
        let mut rng = StdRng::seed_from_u64(seed());
        let (batch, heads, length) = (2, 2, 60);
        for (width, first) in [(192, 64), (96, 20), (100, 16)] {
            let slots = Rows::random([batch, length, heads, width], &mut rng);
            let (words, scales) = slots.on(&device).into_parts();
            let (words, scales) = (words.swap_dims(1, 2), scales.swap_dims(1, 2));
            let view = |first: usize| {
                let words =
                    words
                        .clone()
                        .slice([0..batch, 0..heads, 3..53, first / 4..first / 4 + 16]);
                QuantizedRows::of_parts(words, scales.clone().narrow(2, 3, 50))
                    .expect("the views fit each other")
            };
            let query = Dense::normal([batch, 4, 2, 64], DType::BF16, &mut rng);
            let query = Layout::HeadsLast.store(&query).tensor(&device, DType::BF16);
            let options = || AttentionOptions::new().scale(0.1).causal();
            let query = query.swap_dims(1, 2);
            let output = quantized_attention(query.clone(), view(first), view(0), options());
            let whole = |first| view(first).dequantize(DType::F32).expect("f32 is a float");
            let expected =
                fused_attention(query.cast(DType::F32), whole(first), whole(0), options());
            let difference = read((output.cast(DType::F32) - expected).abs().max());
            assert!(difference[0] < 2e-2, "{name}, {width}: {difference:?}");
        }
    }
}
