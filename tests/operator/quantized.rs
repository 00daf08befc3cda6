//! Tests of attention over quantized keys and values against the f64 reference over the dequantized numbers. Kernels
//! for few rows read the packed int8 in place, and kernels for many rows read a dequantized copy. The cases cover every
//! option, lengths that are not multiples of a tile's size, views of larger tensors, and rows with extreme numbers.
//! Hidden keys may have NaN scales.

mod case;
mod e4m3;
mod many_rows;
mod matrix_units;
mod random;

use crate::case::{Case, FULL, seed};
use crate::dense::{Dense, Layout, read};
use crate::devices::{TestDevice, devices};
use attention_cube::internals::engine::Engine;
use attention_cube::quantized::{QuantizedRows, quantized_attention, try_quantized_attention};
use attention_cube::{
    AttentionError, AttentionOptions, AttentionProblem, CausalAlignment, explain, fused_attention,
    reference,
};
use burn::tensor::{DType, Int, Tensor};
use case::{Quantized, Rows, check};
use rand::{SeedableRng, rngs::StdRng};

fn causal(sizes: [usize; 7]) -> Case {
    Case {
        causal: Some(CausalAlignment::BottomRight),
        ..Case::new(sizes)
    }
}

/// Checks a few query rows in f16, and asserts that the cmma engine serves the call with fragments. The keys are split
/// over cubes (split-KV), and some keys lie past the sequences' lengths.
pub fn check_in_fragments(device: &TestDevice) {
    let quantized = Quantized::new(Case {
        dtype: DType::F16,
        kv_lengths: Some(vec![150, 60]),
        ..causal([2, 4, 2, 3, 150, 40, 36])
    });
    let on = &device.device;
    let query = quantized.inputs.query.tensor(on, DType::F16);
    let (key, value) = (quantized.key.on(on), quantized.value.on(on));
    let problem = AttentionProblem::quantized(&query, &key, &value, &AttentionOptions::new());
    let explanation = explain(&problem.expect("the arguments fit"), on);
    let engine = explanation.forward.kernel.engine();
    assert_eq!(engine, Engine::Cmma, "{explanation}");
    let devices = std::slice::from_ref(device);
    quantized.check_on(devices, &quantized.key, &quantized.value);
}

/// Checks few rows and many rows, where the number of rows is the queries times the query heads of a GQA group. Few
/// rows share a tile. For many rows, the call first makes a dequantized copy of the keys and values.
#[test]
fn int8_few_and_many_rows_match_reference() {
    for (q_heads, kv_heads, q_len, kv_len) in [
        (4, 2, 1, 700),
        (8, 1, 3, 65),
        (2, 2, 32, 33),
        (4, 1, 9, 130),
        (2, 1, 70, 90),
    ] {
        check(causal([2, q_heads, kv_heads, q_len, kv_len, 32, 32]));
    }
}

#[test]
fn int8_head_dims_and_lengths_that_fill_no_tile_match_reference() {
    for (kv_len, head_dim, value_dim) in [(1, 4, 4), (3, 20, 36), (63, 512, 512), (129, 100, 8)] {
        check(causal([1, 2, 1, 2, kv_len, head_dim, value_dim]));
    }
}

#[test]
fn int8_half_precision_matches_reference() {
    for dtype in [DType::F16, DType::BF16] {
        for q_len in [2, 40] {
            check(Case {
                dtype,
                ..causal([2, 4, 2, q_len, 150, 64, 64])
            });
        }
    }
}

#[test]
fn int8_every_option_matches_reference() {
    let ids = |length: i64| (0..2 * length).map(|i| i % length / 30).collect();
    for q_len in [2, 20] {
        let base = Case::new([2, 4, 2, q_len, 90, 32, 20]);
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
                causal: Some(CausalAlignment::BottomRight),
                kv_lengths: Some(vec![0, 41]),
                sinks: true,
                ..base.clone()
            },
            Case {
                causal: Some(CausalAlignment::TopLeft),
                segments: Some((ids(q_len as i64), ids(90))),
                ..base.clone()
            },
        ] {
            check(case);
        }
    }
}

/// Checks keys and values with extreme scales. Some rows have only zero codes, some rows have a scale of 0, and other rows have
/// a tiny or a huge scale.
#[test]
fn int8_rows_of_any_scale_match_reference() {
    for q_len in [1, 40] {
        let mut quantized = Quantized::new(causal([1, 2, 1, q_len, 50, 32, 32]));
        quantized
            .key
            .codes
            .fill_rows(0.0, |[_, _, key]| key % 5 == 0);
        quantized
            .key
            .scales
            .fill_rows(0.0, |[_, _, key]| key % 5 == 1);
        quantized
            .value
            .codes
            .fill_rows(0.0, |[_, _, key]| key % 7 == 0);
        quantized
            .value
            .scales
            .fill_rows(0.0, |[_, _, key]| key % 7 == 1);
        // `huge` is the scale of every seventh row of values. Some of these rows belong to keys of zeros. The scores of
        // such keys are 0, so queries give these huge values a noticeable weight.
        let huge = match quantized.case.dtype {
            // A larger scale would overflow the output, which is in f16.
            DType::F16 => 400.0,
            _ => f64::from(1e30f32),
        };
        quantized
            .value
            .scales
            .fill_rows(huge, |[_, _, key]| key % 7 == 2);
        let tiny = f64::from(1e-30f32);
        quantized
            .key
            .scales
            .fill_rows(tiny, |[_, _, key]| key % 5 == 2);
        quantized.check(&quantized.key, &quantized.value);
    }
}

/// Checks that keys and values past a sequence's length are not read. The scales of these keys and values are NaN or
/// infinite, and their codes are −128, which the quantizer never gives.
#[test]
fn int8_hidden_rows_are_not_read() {
    for q_len in [1, 3, 40] {
        let lengths = [0i64, 1, 33, 64, 100];
        let quantized = Quantized::new(Case {
            kv_lengths: Some(lengths.to_vec()),
            ..causal([lengths.len(), 2, 1, q_len, 100, 32, 32])
        });
        let beyond = |[batch, _, key]: [usize; 3]| key as i64 >= lengths[batch];
        let (mut key, mut value) = (quantized.key.clone(), quantized.value.clone());
        for rows in [&mut key, &mut value] {
            rows.codes.fill_rows(-128.0, beyond);
        }
        key.scales.fill_rows(f64::NAN, beyond);
        value.scales.fill_rows(f64::INFINITY, beyond);
        quantized.check(&key, &value);
    }
}

/// Checks keys and values that are views of one larger tensor in the order `[batch, length, heads, columns]`. The keys are
/// columns 32 to 95 of the rows. The values are columns 0 to 63 of the same rows.
#[test]
fn int8_views_match_reference() {
    for TestDevice { name, device } in devices() {
        let mut rng = StdRng::seed_from_u64(seed());
        let (batch, heads, length, width) = (2, 2, 40, 96);
        let slots = Rows::random([batch, length, heads, width], &mut rng);
        let (words, scales) = slots.on(&device).into_parts();
        let (words, scales) = (words.swap_dims(1, 2), scales.swap_dims(1, 2));
        let view = |first: usize| {
            let words = words
                .clone()
                .slice([0..batch, 0..heads, 3..33, first / 4..first / 4 + 16]);
            QuantizedRows::of_parts(words, scales.clone().narrow(2, 3, 30))
                .expect("the views fit each other")
        };
        for q_len in [1, 40] {
            let query = Dense::normal([batch, 4, q_len, 64], DType::F32, &mut rng);
            let query = query.tensor(&device, DType::F32);
            let options = || AttentionOptions::new().scale(0.1).causal();
            let output = quantized_attention(query.clone(), view(32), view(0), options());
            let whole = |first| view(first).dequantize(DType::F32).expect("f32 is a float");
            let expected = match name == "flex" {
                true => {
                    let by_definition =
                        reference::quantized_attention(query, view(32), view(0), options());
                    by_definition.expect("the reference accepts the views").0
                }
                false => fused_attention(query, whole(32), whole(0), options()),
            };
            let difference = read((output - expected).abs().max());
            assert!(difference[0] < 1e-5, "{name}: {difference:?}");
        }
    }
}

/// Checks the quantizer in every dtype and with two memory layouts. The dequantized number, which is the code times the
/// row's scale, differs from the original number by at most half a scale.
#[test]
fn quantized_rows_err_by_at_most_half_a_scale() {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !device.supports(dtype) {
                continue;
            }
            let on = &device.device;
            let mut rng = StdRng::seed_from_u64(seed());
            let largest = if dtype == DType::F16 { 6e4 } else { 1e38 };
            let sizes = [1.0, 0.0, 1e-3, largest, 1e-37, 300.0];
            let rows = Dense::normal([2, 6, 3, 260], DType::F32, &mut rng);
            let rows = Dense::from_fn(rows.shape, |at| {
                (rows.at(at).clamp(-1.0, 1.0) * sizes[at[1]]) as f32 as f64
            });
            let rows = rows.rounded(dtype);
            let tensor = rows.tensor(on, dtype);
            let heads_last = Layout::HeadsLast.store(&rows).tensor(on, dtype);
            for tensor in [tensor, heads_last.swap_dims(1, 2)] {
                let quantized = QuantizedRows::new(tensor);
                assert_eq!(
                    (quantized.dims(), quantized.bytes()),
                    (rows.shape, 36 * 66 * 4)
                );
                let (words, scales) = quantized.clone().into_parts();
                let (words, scales) = (words.into_data(), read(scales));
                let words: Vec<i32> = words.iter::<i32>().collect();
                let found = read(
                    quantized
                        .dequantize(DType::F32)
                        .expect("f32 is a float dtype"),
                );
                for (row, numbers) in rows.values.chunks(260).enumerate() {
                    let scale = scales[row];
                    let magnitude = numbers.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    let expected = if magnitude < 2f64.powi(-116) {
                        0.0
                    } else {
                        magnitude / 127.0
                    };
                    assert!(
                        (scale - expected).abs() <= 1e-6 * expected,
                        "{} {dtype:?}: scale {scale} instead of {expected}",
                        device.name
                    );
                    for (column, number) in numbers.iter().enumerate() {
                        let word = words[row * 65 + column / 4].to_le_bytes();
                        let code = f64::from(word[column % 4].cast_signed());
                        let exact = code * scale;
                        let bound = (0.5 + 1e-4) * scale + 2f64.powi(-116);
                        assert!(
                            (exact - number).abs() <= bound && code.abs() <= 127.0,
                            "{} {dtype:?}: {number} became {code} · {scale}",
                            device.name
                        );
                        let found = found[row * 260 + column];
                        assert!(
                            (found - exact).abs() <= 1e-6 * exact.abs(),
                            "{}: {found} instead of {exact}",
                            device.name
                        );
                    }
                }
            }
        }
    }
}

/// Checks that a row with NaN or infinity gets the scale NaN, and that the rows beside it keep their scales.
#[test]
fn quantized_row_with_nan_or_infinity_has_nan_scale() {
    for TestDevice { name, device } in devices() {
        for flaw in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut rows = Dense::from_fn([1, 1, 3, 8], |[_, _, _, column]| column as f64);
            rows.values[8 + 5] = flaw;
            let quantized = QuantizedRows::new(rows.tensor(&device, DType::F32));
            let (_, scales) = quantized.into_parts();
            let scales = read(scales);
            assert!(scales[1].is_nan(), "{name}: {scales:?} of {flaw}");
            assert_eq!(scales[0], scales[2], "{name}");
            assert!((scales[0] - 7.0 / 127.0).abs() < 1e-6, "{name}: {scales:?}");
        }
    }
}

/// Checks that quantizing normally distributed keys and values changes the output by less than 2 % of its root mean square.
#[test]
fn int8_attention_is_near_the_unquantized() {
    for TestDevice { name, device } in devices() {
        let case = causal([1, 4, 1, 2, 200, 64, 64]);
        let inputs = case.inputs();
        let tensor = |dense: &Dense| dense.tensor(&device, DType::F32);
        let (query, key, value) = (
            tensor(&inputs.query),
            tensor(&inputs.key),
            tensor(&inputs.value),
        );
        let options = || AttentionOptions::new().causal();
        let whole = fused_attention(query.clone(), key.clone(), value.clone(), options());
        let (key, value) = (QuantizedRows::new(key), QuantizedRows::new(value));
        let output = quantized_attention(query, key, value, options());
        let size = read(whole.clone().powi_scalar(2).mean())[0].sqrt();
        let error = read((output - whole).powi_scalar(2).mean())[0].sqrt();
        // The standard deviation of a code's rounding error is the scale / √12. The scale is the largest element / 127,
        // and the largest element is about three standard deviations of the elements. So the error is less than a
        // hundredth of a standard deviation.
        assert!(error < 0.02 * size, "{name}: {error} of {size}");
    }
}

/// Checks that packed codes and scales have no gradients, even if the codes and scales come from an autodiff device.
#[test]
fn int8_parts_are_detached_from_autodiff() {
    for TestDevice { name, device } in devices() {
        let mut rng = StdRng::seed_from_u64(seed());
        let tracked = device.clone().autodiff();
        let rows = Rows::random([1, 1, 20, 16], &mut rng);
        let query = Dense::normal([1, 2, 3, 16], DType::F32, &mut rng);
        let expected = quantized_attention(
            query.tensor(&device, DType::F32),
            rows.on(&device),
            rows.on(&device),
            AttentionOptions::new(),
        );
        let output = quantized_attention(
            query.tensor(&tracked, DType::F32).require_grad(),
            rows.on(&tracked.clone().gradient_checkpointing()),
            rows.on(&tracked),
            AttentionOptions::new(),
        );
        for (found, expected) in read(output).iter().zip(read(expected)) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{name}: {found} {expected}"
            );
        }
        assert!(!rows.on(&tracked).device().is_autodiff(), "{name}");
    }
}

/// Checks that the query's gradient over int8 keys and values equals the query's gradient over the dequantized keys and
/// values.
#[test]
fn int8_query_gradient_equals_that_over_dequantized_rows() {
    for TestDevice { name, device } in devices() {
        let mut rng = StdRng::seed_from_u64(seed());
        let tracked = device.clone().autodiff();
        let rows = |rng: &mut StdRng| Rows::random([1, 1, 30, 16], rng);
        let (key, value) = (rows(&mut rng), rows(&mut rng));
        let query = Dense::normal([1, 2, 3, 16], DType::F32, &mut rng);
        let leaf = || query.tensor(&tracked, DType::F32).require_grad();
        let gradient = |leaf: Tensor<4>, output: Tensor<4>| {
            let weights = query.tensor(&tracked, DType::F32);
            let gradients = (output * weights).sum().backward();
            read(leaf.grad(&gradients).expect("the query has a gradient"))
        };
        let options = || AttentionOptions::new().causal();
        let of_words = leaf();
        let output = quantized_attention(
            of_words.clone(),
            key.on(&device),
            value.on(&device),
            options(),
        );
        let found = gradient(of_words, output);
        let of_numbers = leaf();
        let tensor = |rows: &Rows| rows.numbers().tensor(&tracked, DType::F32);
        let output = fused_attention(of_numbers.clone(), tensor(&key), tensor(&value), options());
        let expected = gradient(of_numbers, output);
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-5,
                "{name}: {found} instead of {expected}"
            );
        }
    }
}

/// Checks calls without sequences, without queries and without keys, whose outputs are empty or 0.
#[test]
fn int8_empty_tensors_give_zero_output() {
    for TestDevice { name, device } in devices() {
        for (batch, q_len, kv_len) in [(0, 1, 3), (1, 0, 3), (1, 2, 0)] {
            let rows = |length| Tensor::<4>::zeros([batch, 1, length, 8], &device);
            let quantized = || QuantizedRows::new(rows(kv_len));
            let options = AttentionOptions::new();
            let output = quantized_attention(rows(q_len), quantized(), quantized(), options);
            assert_eq!(output.dims(), [batch, 1, q_len, 8], "{name}");
            assert!(read(output).iter().all(|x| *x == 0.0), "{name}");
        }
    }
}

#[test]
fn int8_wrong_arguments_are_refused() {
    for TestDevice { name, device } in devices() {
        let rows = |shape: [usize; 4]| Tensor::<4>::zeros(shape, &device);
        for columns in [0, 6] {
            let error = QuantizedRows::try_new(rows([1, 1, 2, columns]))
                .expect_err("wrong columns are refused");
            let AttentionError::Shape {
                argument,
                dimension,
                found,
                ..
            } = error
            else {
                panic!("{name}: {error}")
            };
            assert_eq!((argument, dimension, found), ("rows", "columns", columns));
        }
        let words = |dtype| Tensor::<4, Int>::zeros([1, 2, 3, 2], (&device, dtype));
        let scales = |shape: [usize; 3]| Tensor::<3>::zeros(shape, &device);
        let error = QuantizedRows::of_parts(words(DType::I32), scales([1, 2, 4]));
        let error = error
            .expect_err("a wrong length of scales is refused")
            .to_string();
        assert!(error.contains("scales has shape [1, 2, 4]") && error.contains("3, the words'"));
        let error = QuantizedRows::of_parts(words(DType::U32), scales([1, 2, 3]));
        assert!(matches!(
            error,
            Err(AttentionError::Dtype {
                argument: "words",
                ..
            })
        ));

        let key = || QuantizedRows::new(rows([1, 2, 3, 8]));
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I32] {
            let serves = dtype != DType::I32 && device.supports_dtype(dtype);
            match key().dequantize(dtype) {
                Ok(numbers) => assert!(serves && numbers.dtype() == dtype, "{name}: {dtype:?}"),
                Err(error) => assert!(!serves, "{name}: {error}"),
            }
        }
        let call = |query, value| {
            try_quantized_attention(rows(query), key(), value, AttentionOptions::new()).map(|_| ())
        };
        let head_dim = call([1, 2, 1, 6], key()).expect_err("another head_dim is refused");
        assert!(
            head_dim.to_string().contains("6, the query's head_dim"),
            "{head_dim}"
        );
        let length = call([1, 2, 1, 8], QuantizedRows::new(rows([1, 2, 4, 8])));
        let length = length.expect_err("another length is refused");
        assert!(
            length.to_string().contains("3, the key's kv_len"),
            "{length}"
        );
        let heads = call([1, 3, 1, 8], key()).expect_err("heads without groups are refused");
        assert!(
            heads
                .to_string()
                .contains("a divisor of the query's 3 heads"),
            "{heads}"
        );
    }
}

/// Checks that `explain` names the engine that reads the packed int8 for 32 rows. For 34 rows, `explain` must name the reason
/// why no engine reads the packed int8.
#[test]
fn int8_explain_names_engine_or_reason() {
    for device in devices().into_iter().filter(TestDevice::is_cube) {
        let on = &device.device;
        let problem = |q_len| {
            let query = Tensor::<4>::zeros([1, 2, q_len, 8], on);
            let rows = QuantizedRows::new(Tensor::<4>::zeros([1, 1, 5, 8], on));
            AttentionProblem::quantized(&query, &rows, &rows, &AttentionOptions::new())
                .expect("the arguments fit")
        };
        let few = explain(&problem(16), on);
        assert_ne!(few.forward.kernel.engine().to_string(), "blocks", "{few}");
        let many = explain(&problem(17), on);
        assert_eq!(many.forward.kernel.engine().to_string(), "blocks", "{many}");
        assert!(many.to_string().contains("are quantized"), "{many}");
    }
}
