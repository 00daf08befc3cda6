//! Tests of options that hide keys: causal masks with both alignments, windows, bool masks of every broadcast shape, and
//! lengths of every integer dtype. Some cases combine all of these options. Hidden keys may contain any value.

use crate::case::{Case, FULL};
use crate::dense::read;
use crate::devices::devices;
use crate::run::Operator;
use attention_cube::CausalAlignment::{self, BottomRight, TopLeft};
use attention_cube::{AttentionOptions, AttentionProblem};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, TensorData};

/// Returns a case with 2 sequences, 2 query heads that share a key head, and head size 32.
fn case(q_len: usize, kv_len: usize) -> Case {
    Case::new([2, 2, 1, q_len, kv_len, 32, 32])
}

#[test]
fn causal_mask_of_both_alignments_matches_reference() {
    for alignment in [BottomRight, TopLeft] {
        for (q_len, kv_len) in [(70, 70), (70, 150), (150, 70), (3, 70), (70, 3)] {
            Case {
                causal: Some(alignment),
                ..case(q_len, kv_len)
            }
            .check();
        }
    }
}

#[test]
fn window_matches_reference() {
    for (left, right) in [
        (Some(20), None),
        (None, Some(20)),
        (Some(10), Some(5)),
        (Some(0), Some(0)),
        (Some(0), None),
        (None, Some(0)),
        (Some(1000), Some(1000)),
        (Some(usize::MAX), Some(usize::MAX)),
    ] {
        Case {
            window: (left, right),
            ..case(100, 130)
        }
        .check();
    }
    Case {
        window: (Some(10), Some(40)),
        ..case(130, 100)
    }
    .check();
}

#[test]
fn causal_window_matches_reference() {
    for alignment in [BottomRight, TopLeft] {
        for (left, right) in [
            (Some(0), Some(0)),
            (Some(30), Some(0)),
            (Some(30), Some(50)),
        ] {
            for (q_len, kv_len) in [(100, 130), (130, 100)] {
                Case {
                    causal: Some(alignment),
                    window: (left, right),
                    ..case(q_len, kv_len)
                }
                .check();
            }
        }
    }
}

#[test]
fn mask_of_every_broadcast_shape_matches_reference() {
    for bits in 0..16 {
        let extent = [0, 1, 2, 3].map(|dim| bits >> dim & 1 == 1);
        for expanded in [false, true] {
            Case {
                mask: Some(extent),
                expanded,
                ..case(66, 70)
            }
            .check();
        }
    }
}

#[test]
fn mask_causal_window_and_lengths_together_match_reference() {
    for causal in [None, Some(BottomRight), Some(TopLeft)] {
        Case {
            mask: Some(FULL),
            causal,
            window: (Some(25), Some(30)),
            kv_lengths: Some(vec![120, 90]),
            ..case(100, 130)
        }
        .check();
    }
}

/// Checks that hidden keys do not matter. `hide` selects keys by their positions. On the devices, the selected keys are
/// infinite and their values are NaN. The reference gets finite keys and values.
fn check_poisoned(case: &Case, hide: impl Fn(usize) -> bool) {
    let clean = case.inputs();
    let mut given = clean.clone();
    given.key.fill_rows(f64::INFINITY, |[_, _, key]| hide(key));
    given.value.fill_rows(f64::NAN, |[_, _, key]| hide(key));
    case.check_inputs(&given, &clean);
}

#[test]
fn causal_mask_hides_nan_right_of_the_diagonal() {
    let causal = Some(CausalAlignment::TopLeft);
    check_poisoned(
        &Case {
            causal,
            ..case(70, 150)
        },
        |key| key >= 70,
    );
}

#[test]
fn window_hides_nan_outside_of_the_window() {
    // Query 0 is at the position of key 40, and the last query is at the position of key 129. Each query sees at most
    // 10 keys to its left, so no query sees the keys before key 30.
    let windowed = Case {
        window: (Some(10), Some(5)),
        ..case(90, 130)
    };
    check_poisoned(&windowed, |key| key < 30);
    let windowed = Case {
        causal: Some(TopLeft),
        window: (Some(10), None),
        ..case(90, 130)
    };
    check_poisoned(&windowed, |key| key >= 90);
}

/// Checks hidden NaN keys that lie between visible keys, in prefill and in decode.
#[test]
fn mask_hides_nan_between_visible_keys() {
    let hidden = |key: usize| key.is_multiple_of(3) || (64..128).contains(&key);
    for q_len in [66, 2] {
        let case = Case {
            mask: Some([false, false, false, true]),
            ..case(q_len, 150)
        };
        let mut clean = case.inputs();
        if let Some(mask) = &mut clean.mask {
            for (key, visible) in mask.values.iter_mut().enumerate() {
                *visible = f64::from(!hidden(key));
            }
        }
        let mut given = clean.clone();
        given.key.fill_rows(f64::NAN, |[_, _, key]| hidden(key));
        given
            .value
            .fill_rows(f64::NEG_INFINITY, |[_, _, key]| hidden(key));
        case.check_inputs(&given, &clean);
    }
}

/// Checks a bias of −∞ that hides some keys from all queries, and all keys from some queries. NaN in these keys, and in
/// the queries that see no key, must not change any result.
#[test]
fn bias_of_minus_infinity_hides_nan() {
    // In the cases with 270 keys, some blocks are partly visible because of the bias alone.
    for (q_len, kv_len, extent, sinks, softcap) in [
        (66, 70, FULL, false, None),
        (66, 70, FULL, true, Some(9.0)),
        (66, 70, [false, false, false, true], false, None),
        (2, 70, FULL, true, None),
        (200, 270, FULL, false, Some(9.0)),
        (200, 270, [false, false, false, true], true, Some(1e8)),
    ] {
        let case = Case {
            bias: Some(extent),
            sinks,
            softcap,
            ..case(q_len, kv_len)
        };
        let hidden_key = |key: usize| key.is_multiple_of(5);
        let blind_query = |query: usize| extent[2] && query == 1;
        let mut clean = case.inputs();
        if let Some(bias) = &mut clean.bias {
            for (index, value) in bias.values.iter_mut().enumerate() {
                if hidden_key(index % kv_len) || blind_query(index / kv_len % q_len) {
                    *value = f64::NEG_INFINITY;
                }
            }
        }
        case.check_inputs(&clean, &clean);
        let mut given = clean.clone();
        given.key.fill_rows(f64::NAN, |[_, _, key]| hidden_key(key));
        given
            .value
            .fill_rows(f64::INFINITY, |[_, _, key]| hidden_key(key));
        given
            .query
            .fill_rows(f64::NAN, |[_, _, query]| blind_query(query));
        given
            .output_gradient
            .fill_rows(f64::NAN, |[_, _, query]| blind_query(query));
        case.check_inputs(&given, &clean);
    }
}

/// Checks the number [`AttentionProblem::visible_pairs`] against a count by loops over queries and keys.
#[test]
fn visible_pairs_equal_a_count_by_loops() {
    let windows = [
        (None, None),
        (Some(2), None),
        (Some(1), Some(3)),
        (Some(usize::MAX), Some(usize::MAX)),
    ];
    for (q_len, kv_len) in [(5, 5), (3, 9), (9, 3)] {
        for alignment in [None, Some(BottomRight), Some(TopLeft)] {
            for (left, right) in windows {
                let zeros = |length| Tensor::<4>::zeros([2, 3, length, 4], &Device::flex());
                let mut options = AttentionOptions::new().window(left, right);
                if let Some(alignment) = alignment {
                    options = options.causal_aligned(alignment);
                }
                let (query, key) = (zeros(q_len), zeros(kv_len));
                let context = format!("{q_len}, {kv_len}, {options:?}");
                let problem = AttentionProblem::new(&query, &key, &key, &options)
                    .unwrap_or_else(|error| panic!("{context}: {error}"));
                let offset = match alignment {
                    Some(TopLeft) => 0,
                    _ => kv_len as i128 - q_len as i128,
                };
                let sees = |i: usize, j: usize| {
                    let distance = j as i128 - (i as i128 + offset);
                    let right = if alignment.is_some() { Some(0) } else { right };
                    left.is_none_or(|left| -distance <= left as i128)
                        && right.is_none_or(|right| distance <= right as i128)
                };
                let pairs = (0..q_len).flat_map(|i| (0..kv_len).map(move |j| (i, j)));
                let per_head = pairs.filter(|&(i, j)| sees(i, j)).count();
                assert_eq!(problem.visible_pairs(), 6 * per_head as u64, "{context}");
            }
        }
    }
}

/// Checks that lengths are clamped to the number of keys, for every integer dtype that a device supports. Some lengths
/// exceed the range of i32. The narrowest dtypes cannot represent 300, the number of keys.
#[test]
fn kv_lengths_of_every_integer_dtype_are_clamped() {
    const KEYS: usize = 300;
    let lengths: [(DType, &[i64]); 8] = [
        (
            DType::I64,
            &[
                i64::MAX,
                i64::MIN,
                (1 << 32) + 3,
                -(1 << 32) + 3,
                1 << 31,
                u32::MAX as i64,
                0,
                7,
            ],
        ),
        (
            DType::I32,
            &[i32::MAX as i64, i32::MIN as i64, -1, 300, 301, 7],
        ),
        (DType::I16, &[i16::MAX as i64, i16::MIN as i64, 300, 7]),
        (DType::I8, &[i8::MAX as i64, i8::MIN as i64, 100, 7]),
        (DType::U64, &[i64::MAX, (1 << 32) + 3, 1 << 40, 0, 300, 7]),
        (DType::U32, &[u32::MAX as i64, 1 << 31, 0, 300, 7]),
        (DType::U16, &[u16::MAX as i64, 1 << 15, 0, 300, 7]),
        (DType::U8, &[u8::MAX as i64, 1 << 7, 0, 7]),
    ];
    for device in devices() {
        for (dtype, given) in lengths {
            if !device.device.supports_dtype(dtype) {
                continue;
            }
            let batch = given.len();
            let random = |length| {
                let shape = [batch, 1, length, 16];
                Tensor::<4>::random(shape, Distribution::Default, (&device.device, DType::F32))
            };
            let (query, key, value) = (random(2), random(KEYS), random(KEYS));
            let with = |lengths: &[i64], dtype| {
                let data = TensorData::new(lengths.to_vec(), [batch]);
                let lengths = Tensor::<1, Int>::from_data(data, (&device.device, dtype));
                AttentionOptions::new().kv_lengths(lengths)
            };
            let clamped: Vec<i64> = given.iter().map(|n| (*n).clamp(0, KEYS as i64)).collect();
            for operator in [Operator::Fused, Operator::Reference] {
                let call = |options| {
                    let (output, lse) = operator
                        .call(query.clone(), key.clone(), value.clone(), options)
                        .unwrap_or_else(|error| panic!("{}: {error}", device.name));
                    [read(output), read(lse)]
                };
                assert_eq!(
                    call(with(given, dtype)),
                    call(with(&clamped, DType::I32)),
                    "{}, {operator:?}: {dtype:?} {given:?}",
                    device.name
                );
            }
        }
    }
}
