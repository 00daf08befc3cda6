//! Tests of e4m3 keys and values (FP8): their codes, their pages, and scales per row, per head or per tensor.

use super::case::{Quantized, e4m3_number};
use super::causal;
use crate::case::{Case, FULL, seed};
use crate::dense::{Dense, read};
use crate::devices::{TestDevice, devices};
use attention_cube::paged::{Places, append_quantized, try_paged_quantized_attention};
use attention_cube::quantized::{CodeFormat, QuantizedRows, try_quantized_attention};
use attention_cube::{AttentionError, AttentionOptions};
use burn::tensor::{DType, Device, Int, Tensor};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// The tested scales: one per tensor, per head, per sequence and head, and per row. The flags stand for batch, heads
/// and length. If a flag is true, each index of that dimension has a scale of its own.
const PER: [[bool; 3]; 4] = [
    [false, false, false],
    [false, true, false],
    [true, true, false],
    [true, true, true],
];

fn check(case: Case, per: [bool; 3]) {
    let quantized = Quantized::e4m3(case, per);
    quantized.check(&quantized.key, &quantized.value);
}

#[test]
fn e4m3_few_and_many_rows_match_reference() {
    let sizes = [
        (4, 2, 1, 700),
        (8, 1, 3, 65),
        (2, 2, 32, 33),
        (2, 1, 70, 90),
    ];
    for ((q_heads, kv_heads, q_len, kv_len), per) in sizes.into_iter().zip(PER) {
        check(causal([2, q_heads, kv_heads, q_len, kv_len, 32, 36]), per);
    }
}

#[test]
fn e4m3_half_precision_matches_reference() {
    for dtype in [DType::F16, DType::BF16] {
        for (q_len, per) in [2, 40].into_iter().zip(PER) {
            let case = causal([2, 4, 2, q_len, 150, 64, 64]);
            check(Case { dtype, ..case }, per);
        }
    }
}

#[test]
fn e4m3_options_match_reference() {
    let case = Case {
        mask: Some(FULL),
        bias: Some([false, true, true, true]),
        sinks: true,
        softcap: Some(3.0),
        window: (Some(60), Some(2)),
        ..Case::new([2, 4, 2, 2, 90, 32, 20])
    };
    check(case, PER[1]);
}

/// Checks that the NaN codes and scales of keys past a sequence's length do not reach the output.
#[test]
fn e4m3_hidden_rows_are_not_read() {
    for q_len in [1, 40] {
        let lengths = [0i64, 33, 100];
        let quantized = Quantized::e4m3(
            Case {
                kv_lengths: Some(lengths.to_vec()),
                ..causal([lengths.len(), 2, 1, q_len, 100, 32, 32])
            },
            PER[3],
        );
        let beyond = |[batch, _, key]: [usize; 3]| key as i64 >= lengths[batch];
        let (mut key, mut value) = (quantized.key.clone(), quantized.value.clone());
        for rows in [&mut key, &mut value] {
            rows.codes.fill_rows(480.0, beyond);
            rows.scales.fill_rows(f64::NAN, beyond);
        }
        quantized.check(&key, &value);
    }
}

/// Returns e4m3 numbers of every magnitude, numbers halfway between two neighboring e4m3 numbers, and numbers that e4m3
/// cannot represent.
fn numbers(count: usize) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed());
    let number = |index: usize| {
        let [low, high] = [0, 1].map(|next| e4m3_number((index % 126) as u8 + next));
        let magnitude = match index / 126 % 3 {
            0 => low,
            1 => (low + high) / 2.0,
            _ => f64::from(rng.random_range(-12.0f32..9.0).exp2()),
        };
        if index.is_multiple_of(2) {
            magnitude
        } else {
            -magnitude
        }
    };
    (0..count).map(number).collect()
}

/// Returns the e4m3 number that is nearest to `x`. Ties go to the even code.
fn nearest(x: f64) -> f64 {
    let distance = |code: &u8| ((e4m3_number(*code) - x.abs()).abs(), code % 2);
    let code = (0..127u8).min_by(|a, b| distance(a).partial_cmp(&distance(b)).expect("no NaN"));
    e4m3_number(code.expect("there are codes")).copysign(x)
}

#[test]
fn e4m3_codes_are_the_nearest_numbers() {
    for TestDevice { name, device } in devices() {
        let shape = [1, 2, 9, 84];
        let numbers = numbers(shape.iter().product());
        let rows = Dense::from_fn(shape, |[_, h, j, c]| numbers[(h * 9 + j) * 84 + c]);
        let scale = Tensor::<3>::from_data([[[0.5f32], [1.0]]], (&device, DType::F32));
        let quantized = QuantizedRows::e4m3(rows.tensor(&device, DType::F32), scale);
        assert_eq!(
            (quantized.format(), quantized.dims()),
            (CodeFormat::E4m3, shape)
        );
        let found = read(
            quantized
                .dequantize(DType::F32)
                .expect("f32 is a float dtype"),
        );
        for (index, (found, number)) in found.into_iter().zip(numbers).enumerate() {
            let scale = if index < 9 * 84 { 0.5 } else { 1.0 };
            assert_eq!(found, nearest(number / scale) * scale, "{name}: {number}");
        }
    }
}

/// Checks rows that are appended to pages with one scale per head. Attention over the pages must give the results of
/// contiguous rows.
#[test]
fn e4m3_pages_equal_contiguous_rows() {
    for TestDevice { name, device } in devices() {
        let mut rng = StdRng::seed_from_u64(seed());
        let mut random = |shape: [usize; 4]| {
            Dense::normal(shape, DType::F32, &mut rng).tensor(&device, DType::F32)
        };
        let (query, rows) = (random([1, 4, 1, 32]), random([1, 2, 40, 32]));
        let scales = || Tensor::<3>::from_data([[[0.02f32], [0.5]]], (&device, DType::F32));
        let pages = append_quantized(
            QuantizedRows::e4m3(random([6, 2, 16, 32]), scales()),
            rows.clone(),
            places(&device),
        )
        .expect("the rows fit the pages");
        let table = places(&device).page_table;
        let lengths = Tensor::<1, Int>::from_ints([40], &device);
        let options = AttentionOptions::new().causal().kv_lengths(lengths);
        let found =
            try_paged_quantized_attention(query.clone(), pages.clone(), pages, table, options);
        let contiguous = QuantizedRows::e4m3(rows, scales());
        let expected = try_quantized_attention(
            query,
            contiguous.clone(),
            contiguous,
            AttentionOptions::new().causal(),
        );
        let [found, expected] = [found, expected].map(|result| result.expect("the arguments fit"));
        let difference = read((found.0 - expected.0).abs().max())[0];
        assert!(difference < 1e-5, "{name}: {difference}");
    }
}

fn places(device: &Device) -> Places {
    Places {
        page_table: Tensor::from_ints([[4, 0, 3]], device),
        starts: Tensor::from_ints([0], device),
        counts: None,
    }
}

#[test]
fn e4m3_scales_that_do_not_fit_are_refused() {
    for TestDevice { device, .. } in devices() {
        let rows = |heads| Tensor::<4>::zeros([2, heads, 5, 8], (&device, DType::F32));
        let scales = |shape: [usize; 3]| Tensor::<3>::ones(shape, (&device, DType::F32));
        for shape in [[3, 1, 1], [2, 3, 5], [1, 1, 4]] {
            let error = QuantizedRows::try_e4m3(rows(2), scales(shape)).expect_err("no fit");
            let is_named = matches!(
                error,
                AttentionError::Shape {
                    argument: "scales",
                    ..
                }
            );
            assert!(is_named, "{error}");
        }
        let per_row = QuantizedRows::e4m3(rows(2), scales([2, 2, 5]));
        let places = Places {
            page_table: Tensor::from_ints([[0]], &device),
            ..places(&device)
        };
        let new = rows(2).slice([0..1, 0..2, 0..1]);
        let error = append_quantized(per_row.clone(), new, places).expect_err("per row");
        assert!(error.to_string().starts_with("scales"), "{error}");

        let query = Tensor::<4>::zeros([2, 2, 1, 8], (&device, DType::F32));
        let int8 = QuantizedRows::new(rows(2));
        let options = AttentionOptions::new();
        let error = try_quantized_attention(query, per_row, int8, options).expect_err("mixed");
        let expected = AttentionError::CodeFormats {
            key: CodeFormat::E4m3,
            value: CodeFormat::Int8,
        };
        assert_eq!(error, expected);
    }
}

#[test]
fn e4m3_random_problem_matches_reference() {
    for number in 8..11 {
        let quantized = Quantized::e4m3(super::random::problem(number), PER[number as usize % 4]);
        quantized.check(&quantized.key, &quantized.value);
    }
}
