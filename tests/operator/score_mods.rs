//! Tests of score mods and mask mods, which compute scores and masks by code. Kernels must give the results of the
//! reference, which runs this code on the CPU.

use crate::case::{Case, Change, FULL, Hide};
use crate::dense::Layout;
use crate::devices::devices;
use attention_cube::CausalAlignment::{BottomRight, TopLeft};
use attention_cube::score_mod::{Alibi, DistanceBias, SameDocument, SoftWindow};
use attention_cube::{AttentionOptions, fused_attention, try_fused_attention};
use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};

fn plain(q_len: usize, kv_len: usize, width: usize) -> Case {
    Case::new([2, 4, 2, q_len, kv_len, width, width])
}

/// Returns two variants of `case`. The first variant has a score mod, and the second variant has a score mod and a mask mod.
fn with_code(case: &Case) -> [Case; 2] {
    [None, Some(Hide::Sieve)].map(|mask_mod| Case {
        score_mod: Some(Change::Bent),
        mask_mod,
        ..case.clone()
    })
}

#[test]
fn code_of_prompts_matches_reference() {
    for (q_len, kv_len, width) in [(70, 90, 32), (33, 200, 5)] {
        for case in with_code(&plain(q_len, kv_len, width)) {
            case.check();
        }
    }
}

#[test]
fn code_of_few_rows_matches_reference() {
    // The cases have few rows and 1300 keys. The heads of a GQA group therefore share a tile, and the keys are split over
    // cubes (split-KV).
    for (group, q_len) in [(1, 1), (4, 3)] {
        Case {
            q_heads: group,
            kv_heads: 1,
            causal: Some(BottomRight),
            score_mod: Some(Change::Bent),
            mask_mod: Some(Hide::Sieve),
            ..plain(q_len, 1300, 32)
        }
        .check();
    }
}

#[test]
fn alibi_of_each_alignment_matches_reference() {
    let case = Case {
        score_mod: Some(Change::Alibi),
        ..plain(40, 70, 32)
    };
    for causal in [None, Some(BottomRight), Some(TopLeft)] {
        for (kv_lengths, query_lengths) in [
            (None, None),
            (Some(vec![60, 33]), None),
            (Some(vec![60, 33]), Some(vec![40, 7])),
        ] {
            Case {
                causal,
                kv_lengths,
                query_lengths,
                ..case.clone()
            }
            .check();
        }
    }
}

/// Checks ALiBi on tensor cores, with keys before and after each query, so that distances of both signs fill whole blocks.
#[test]
fn alibi_of_both_signs_in_half_precision_matches_reference() {
    for (q_len, kv_len, width, causal) in [
        (256, 512, 64, None),
        (512, 256, 128, None),
        (300, 300, 128, Some(TopLeft)),
        (130, 400, 256, None),
        (130, 400, 512, None),
    ] {
        Case {
            dtype: DType::BF16,
            batch: 1,
            q_heads: 4,
            kv_heads: 2,
            causal,
            score_mod: Some(Change::Alibi),
            ..plain(q_len, kv_len, width)
        }
        .check();
    }
}

#[test]
fn code_with_each_option_matches_reference() {
    let case = Case {
        score_mod: Some(Change::Bent),
        mask_mod: Some(Hide::Sieve),
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
            dropout: Some((0.3, 17)),
            scale: Some(-0.2),
            layouts: [Layout::HeadsLast; 4],
            ..case.clone()
        },
    ] {
        case.check();
    }
}

/// Checks partial tiles for each kind of matrix-unit kernel. A software driver runs only the f16 case, because it does
/// not support bf16.
#[test]
fn code_in_half_precision_matches_reference() {
    for (dtype, q_len, width) in [
        (DType::F16, 150, 64),
        (DType::BF16, 150, 64),
        (DType::BF16, 150, 128),
        (DType::BF16, 90, 256),
        (DType::BF16, 70, 512),
    ] {
        let case = Case {
            dtype,
            causal: Some(BottomRight),
            ..plain(q_len, 190, width)
        };
        for case in with_code(&case) {
            case.check();
        }
    }
}

/// Checks whole tiles and fully visible blocks. In such blocks, kernels do not test whether a key is visible.
#[test]
fn code_of_full_blocks_in_half_precision_matches_reference() {
    for (dtype, bias) in [
        (DType::BF16, None),
        (DType::BF16, Some(FULL)),
        (DType::BF16, Some([false, true, false, false])),
        (DType::F16, None),
    ] {
        let case = Case {
            dtype,
            bias,
            ..plain(256, 512, 64)
        };
        for case in with_code(&case) {
            case.check();
        }
    }
}

/// Checks that NaN in keys and values reaches no result if the mask mod hides these keys from all queries.
#[test]
fn nan_behind_mask_mod_reaches_no_result() {
    for (dtype, q_len, width) in [
        (DType::F32, 1, 64),
        (DType::F32, 70, 64),
        (DType::BF16, 70, 64),
        (DType::BF16, 256, 128),
        (DType::BF16, 128, 256),
        (DType::BF16, 70, 512),
    ] {
        let case = Case {
            dtype,
            mask_mod: Some(Hide::Keys),
            ..Case::new([1, 1, 1, q_len, 256, width, width])
        };
        let inputs = case.inputs();
        let unused = case.unused(&inputs);
        assert!(unused.keys.contains(&true));
        let mut poisoned = inputs.clone();
        for key in (0..case.kv_len).filter(|key| unused.keys[*key]) {
            let row = key * width..(key + 1) * width;
            poisoned.key.values[row.clone()].fill(f64::NAN);
            poisoned.value.values[row].fill(f64::NAN);
        }
        case.check_inputs(&poisoned, &inputs);
    }
}

/// Checks a mask mod without a score mod in three cases: alone, with a softcap, and with a causal mask. Under the causal
/// mask, some queries see no key.
#[test]
fn mask_mod_alone_matches_reference() {
    for (softcap, causal) in [(None, None), (Some(3.0), None), (None, Some(TopLeft))] {
        Case {
            mask_mod: Some(Hide::Sieve),
            softcap,
            causal,
            ..plain(40, 50, 32)
        }
        .check();
    }
}

/// Checks score mods whose table is a broadcast or sliced view.
#[test]
fn strided_table_equals_contiguous_table() {
    for device in devices() {
        let device = device.device;
        let random = || {
            let shape = [1, 4, 20, 16];
            Tensor::<4>::random(shape, Distribution::Default, (&device, DType::F32))
        };
        let (query, key, value) = (random(), random(), random());
        let alibi = |table: Tensor<1>| {
            let options = AttentionOptions::new().score_mod::<Alibi>(Some(table));
            fused_attention(query.clone(), key.clone(), value.clone(), options)
        };
        let table = |slopes: &[f32]| {
            let data = TensorData::new(slopes.to_vec(), [slopes.len()]);
            Tensor::<1>::from_data(data, (&device, DType::F32))
        };
        let columns = TensorData::new(vec![0.5f32, 9.0, 0.25, 9.0, 0.125, 9.0, 1.0, 9.0], [4, 2]);
        let sliced = Tensor::<2>::from_data(columns, (&device, DType::F32)).slice([0..4, 0..1]);
        for (strided, contiguous) in [
            (table(&[0.5]).expand([4]), table(&[0.5; 4])),
            (sliced.squeeze_dim(1), table(&[0.5, 0.25, 0.125, 1.0])),
        ] {
            let difference = (alibi(strided) - alibi(contiguous)).abs().max();
            assert_eq!(difference.into_scalar::<f32>(), 0.0);
        }
    }
}

/// Computes attention once with the score mod in `code`, and once with `bias` instead of the score mod. Checks that the
/// two outputs are nearly equal.
fn check_equal(code: AttentionOptions, bias: Tensor<4>, q_len: usize) {
    let device = bias.device();
    let heads = bias.dims()[1];
    let random = || {
        let shape = [2, heads, q_len, 32];
        Tensor::<4>::random(shape, Distribution::Normal(0.0, 1.0), (&device, DType::F32))
    };
    let (query, key, value) = (random(), random(), random());
    let call = |options| fused_attention(query.clone(), key.clone(), value.clone(), options);
    let expected = call(AttentionOptions::new().bias(bias));
    let difference = (call(code) - expected).abs().max().into_scalar::<f32>();
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn ready_score_mods_equal_their_bias() {
    let (heads, len) = (4, 50);
    for device in devices() {
        let device = device.device;
        let bias = |of: &dyn Fn(usize, i64) -> f32| {
            let mut values = Vec::new();
            for h in 0..heads {
                for i in 0..len as i64 {
                    values.extend((0..len as i64).map(|j| of(h, i - j)));
                }
            }
            let data = TensorData::new(values, [1, heads, len, len]);
            Tensor::<4>::from_data(data, (&device, DType::F32))
        };
        let first = |table: Tensor<1>| table.narrow(0, 0, 1).into_scalar::<f32>();
        let wide = Tensor::<2>::zeros([2, 515], (&device, DType::F32)).cast(DType::F16);
        assert_eq!(first(DistanceBias::table(wide)), 257.0);

        let slopes = Alibi::slopes(heads, &device);
        let alibi = |h: usize, distance: i64| -(0.25f32.powi(h as i32 + 1)) * distance.abs() as f32;
        let code = AttentionOptions::new().score_mod::<Alibi>(Some(slopes));
        check_equal(code, bias(&alibi), len);

        let table = SoftWindow::table(10, 0.3, &device);
        let code = AttentionOptions::new().score_mod::<SoftWindow>(Some(table));
        let soft = |_, distance: i64| -0.3 * (distance.abs() - 10).max(0) as f32;
        check_equal(code, bias(&soft), len);

        let weight = |bucket: usize, head: usize| ((bucket * 7 + head * 3) % 11) as f32 * 0.2;
        let weights: Vec<f32> = (0..8 * heads)
            .map(|at| weight(at / heads, at % heads))
            .collect();
        let weights = TensorData::new(weights, [8, heads]);
        let weights = Tensor::<2>::from_data(weights, (&device, DType::F32));
        let code = AttentionOptions::new()
            .score_mod::<DistanceBias>(Some(DistanceBias::t5_table(weights, true, 16)));
        // Buckets 0 to 3 are for the query's own key and earlier keys, and buckets 4 to 7 are for later keys. The four
        // buckets of each half are for the distances 0, 1, 2 to 5, and 6 and more.
        let bucket = |distance: i64| match distance.unsigned_abs() {
            below @ 0..2 => below as usize,
            2..6 => 2,
            _ => 3,
        };
        let t5 = |h, distance: i64| weight(bucket(distance) + if distance < 0 { 4 } else { 0 }, h);
        check_equal(code, bias(&t5), len);
    }
}

#[test]
fn same_document_equals_segments() {
    for device in devices() {
        let device = device.device;
        let ids: Vec<i32> = (0..100).map(|token| token % 50 / 13 + token / 50).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [2, 50]), &device);
        let random = || {
            let normal = Distribution::Normal(0.0, 1.0);
            Tensor::<4>::random([2, 2, 50, 32], normal, (&device, DType::F32))
        };
        let (query, key, value) = (random(), random(), random());
        let call = |options| fused_attention(query.clone(), key.clone(), value.clone(), options);
        let table = SameDocument::table(ids.clone());
        let by_code = call(
            AttentionOptions::new()
                .causal()
                .mask_mod::<SameDocument>(Some(table)),
        );
        let by_segments = call(AttentionOptions::new().causal().segments(ids.clone(), ids));
        let difference = (by_code - by_segments).abs().max().into_scalar::<f32>();
        assert!(difference < 1e-6, "{difference}");
    }
}

#[test]
fn table_of_wrong_dtype_or_device_is_refused() {
    let device = burn::tensor::Device::flex();
    let random = || Tensor::<4>::random([1, 1, 4, 8], Distribution::Default, (&device, DType::F32));
    let table = Tensor::<1>::ones([4], (&device, DType::F64));
    let options = AttentionOptions::new().score_mod::<Alibi>(Some(table));
    let refused = try_fused_attention(random(), random(), random(), options);
    let text = refused.expect_err("f64 beside f32 is refused").to_string();
    assert!(
        text.contains("the table of the score mod has dtype F64"),
        "{text}"
    );
}

#[test]
#[should_panic(expected = "the table of the score mod needs a gradient")]
fn tracked_table_is_refused() {
    let device = burn::tensor::Device::flex().autodiff();
    let random = || Tensor::<4>::random([1, 1, 4, 8], Distribution::Default, (&device, DType::F32));
    let table = Tensor::<1>::ones([1], (&device, DType::F32)).require_grad() * 2.0;
    let options = AttentionOptions::new().score_mod::<Alibi>(Some(table));
    fused_attention(random(), random(), random(), options);
}

/// Checks that a read past the end of a table gives the last element, and that a read from an empty table gives 0.
#[test]
fn reads_outside_of_table_give_last_element_or_zero() {
    for device in devices() {
        let device = device.device;
        let random = || {
            let shape = [1, 4, 20, 16];
            Tensor::<4>::random(shape, Distribution::Default, (&device, DType::F32))
        };
        let (query, key, value) = (random(), random(), random());
        let call = |options| fused_attention(query.clone(), key.clone(), value.clone(), options);
        let alibi = |slopes: &[f32]| {
            let data = TensorData::new(slopes.to_vec(), [slopes.len()]);
            let table = Tensor::<1>::from_data(data, (&device, DType::F32));
            call(AttentionOptions::new().score_mod::<Alibi>(Some(table)))
        };
        let differs = |a: Tensor<4>, b: Tensor<4>| (a - b).abs().max().into_scalar::<f32>();
        assert_eq!(
            differs(alibi(&[0.5, 0.25]), alibi(&[0.5, 0.25, 0.25, 0.25])),
            0.0
        );
        assert!(differs(alibi(&[]), call(AttentionOptions::new())) < 1e-6);
    }
}
