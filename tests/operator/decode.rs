//! Tests of decode: few queries over many keys. The query heads of a GQA group, which share a key head, also share a
//! tile. The keys are split over cubes (thread blocks), which is called split-KV. The kernel `combine` then merges the
//! results of the splits. The tests cover lengths, sinks and windows.

use crate::case::{Case, FULL};
use crate::dense::{Dense, read};
use crate::devices::cube_devices;
use attention_cube::{
    AttentionOptions, AttentionProblem, CausalAlignment, explain, fused_attention,
};
use burn::tensor::{DType, Tensor};

/// Returns a case with `q_len` queries per head, and enough keys for split-KV on every device.
fn case(q_len: usize) -> Case {
    Case {
        causal: Some(CausalAlignment::BottomRight),
        ..Case::new([2, 4, 2, q_len, 3000, 32, 32])
    }
}

/// Checks that every engine splits the keys. Without split-KV, the two sequences with two key heads each would occupy only four
/// cubes.
#[test]
fn decode_few_cubes_splits_keys() {
    for device in cube_devices() {
        let zeros = |heads, length| Tensor::<4>::zeros([2, heads, length, 32], &device.device);
        let (query, key) = (zeros(4, 1), zeros(2, 3000));
        let problem = AttentionProblem::new(&query, &key, &key, &AttentionOptions::new().causal())
            .unwrap_or_else(|error| panic!("{}: {error}", device.name));
        let explanation = explain(&problem, &device.device);
        assert!(
            explanation.forward.kernel.splits() > 1,
            "{}: {explanation}",
            device.name
        );
    }
}

#[test]
fn decode_one_to_eight_queries_matches_reference() {
    for q_len in [1, 2, 3, 5, 8] {
        case(q_len).check();
    }
}

/// Checks tiles that hold rows of several heads. For some GQA groups, the number of rows (heads times queries) exceeds
/// the smallest tile.
#[test]
fn decode_large_groups_match_reference() {
    for (q_heads, kv_heads, q_len) in [(8, 1, 1), (8, 1, 3), (16, 1, 2), (6, 2, 8)] {
        Case {
            causal: Some(CausalAlignment::BottomRight),
            ..Case::new([1, q_heads, kv_heads, q_len, 700, 32, 32])
        }
        .check();
    }
}

/// Checks the tile sizes of half precision: 16, 32 and 64 rows. The tiles are full or partly filled. Each tile is
/// tested with all options that hide keys, and keys past a sequence's length are NaN.
#[test]
fn decode_half_precision_tiles_match_reference() {
    for (q_heads, kv_heads, q_len) in [(4, 1, 3), (2, 2, 16), (8, 1, 4), (8, 1, 7)] {
        for (head_dim, value_dim) in [(24, 40), (64, 64), (128, 128), (256, 256), (300, 272)] {
            let lengths = [311, 0];
            let plain = Case {
                dtype: DType::BF16,
                kv_lengths: Some(lengths.map(|length| length as i64).to_vec()),
                ..Case::new([2, q_heads, kv_heads, q_len, 350, head_dim, value_dim])
            };
            let hiding = Case {
                mask: Some(FULL),
                bias: Some([false, true, false, true]),
                softcap: Some(5.0),
                ..plain.clone()
            };
            let causal = Case {
                causal: Some(CausalAlignment::BottomRight),
                sinks: true,
                ..plain
            };
            for case in [causal, hiding] {
                let clean = case.inputs();
                let mut given = clean.clone();
                for operand in [&mut given.key, &mut given.value] {
                    operand.fill_rows(f64::NAN, |[batch, _, key]| key >= lengths[batch]);
                }
                case.check_inputs(&given, &clean);
            }
        }
    }
}

/// Checks that NaN keys past a sequence's length do not affect results. The tested lengths are 0, fewer keys than one split
/// holds, fewer keys than queries, and all keys.
#[test]
fn decode_kv_lengths_hide_nan_keys() {
    for q_len in [1, 4] {
        let kv_lengths = Some(vec![0, 1, 3, 60, 200, 3000]);
        let case = Case {
            batch: 6,
            kv_lengths,
            ..case(q_len)
        };
        let clean = case.inputs();
        let mut given = clean.clone();
        let lengths = [0, 1, 3, 60, 200, 3000];
        given
            .key
            .fill_rows(f64::NAN, |[batch, _, key]| key >= lengths[batch]);
        given
            .value
            .fill_rows(f64::NAN, |[batch, _, key]| key >= lengths[batch]);
        case.check_inputs(&given, &clean);
    }
}

#[test]
fn decode_sinks_are_joined_once() {
    for kv_lengths in [None, Some(vec![0, 500])] {
        Case {
            sinks: true,
            kv_lengths,
            ..case(2)
        }
        .check();
    }
}

#[test]
fn decode_windows_match_reference() {
    for left in [0, 100, 1023, usize::MAX] {
        Case {
            window: (Some(left), Some(0)),
            ..case(2)
        }
        .check();
    }
    let window = (Some(100), Some(0));
    Case {
        window,
        kv_lengths: Some(vec![50, 2000]),
        ..case(2)
    }
    .check();
}

#[test]
fn decode_masks_and_biases_match_reference() {
    Case {
        mask: Some(FULL),
        ..case(2)
    }
    .check();
    Case {
        bias: Some([false, true, true, true]),
        ..case(2)
    }
    .check();
    Case {
        softcap: Some(3.0),
        ..case(1)
    }
    .check();
}

#[test]
fn decode_segments_match_reference() {
    let queries = vec![1, 2, 1, 3];
    let keys = (0..2 * 3000).map(|key| (key % 3000) / 1000).collect();
    Case {
        causal: None,
        segments: Some((queries, keys)),
        ..case(2)
    }
    .check();
}

/// Checks a batch of 66,000 sequences. The launch needs more cubes than one dimension of the launch grid allows.
#[test]
fn decode_more_cubes_than_one_grid_dimension_matches_values() {
    for device in cube_devices() {
        let one = Tensor::<4>::zeros([1; 4], &device.device);
        let problem = AttentionProblem::new(&one, &one, &one, &AttentionOptions::new())
            .unwrap_or_else(|error| panic!("{}: {error}", device.name));
        let profile = explain(&problem, &device.device).device;
        if profile.is_some_and(|profile| profile.cube_count <= u32::from(u16::MAX)) {
            // Each sequence has one key, so its output must equal that key's value.
            let values = Dense::from_fn([66_000, 1, 1, 4], |[batch, _, _, _]| batch as f64);
            let tensor = values.tensor(&device.device, DType::F32);
            let (query, key) = (tensor.clone(), tensor.clone());
            let output = fused_attention(query, key, tensor, AttentionOptions::new());
            assert!(read(output) == values.values, "{}", device.name);
        }
    }
}
