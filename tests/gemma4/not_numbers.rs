//! Tests models with NaN in their weights. Greedy decoding and sampling end with an error, both on the host and in
//! kernels.

use crate::devices::devices;
use crate::fixture::{Fixture, greedy};
use crate::programs::folder::Folder;
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_gemma4::{Gemma4, Gemma4Error, LoadOptions, Next, Sampler, Sampling};
use std::ops::ControlFlow;

const NONE: f32 = f32::NEG_INFINITY;

/// Returns the greedy token (argmax) of each row of logits.
fn likeliest(rows: &[Vec<f32>], dtype: DType, device: &Device) -> Result<Vec<u32>, Gemma4Error> {
    let shape = [rows.len(), 1, rows[0].len()];
    let data = TensorData::new(rows.concat(), shape).convert_dtype(dtype);
    Next::of(Tensor::from_data(data, (device, dtype))).argmax()
}

#[track_caller]
fn check(what: &str, outcome: Result<impl std::fmt::Debug, Gemma4Error>) {
    match outcome {
        Err(Gemma4Error::Argument {
            argument: "logits", ..
        }) => (),
        other => panic!("{what}: {other:?}"),
    }
}

#[test]
fn argmax_of_a_row_without_finite_logits_is_an_error() {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !device.computes_in(dtype) {
                continue;
            }
            // With 3 or 300 columns, a row is one chunk, which one cube (thread block) processes. With 40,000 columns,
            // a row has several chunks.
            for columns in [3, 300, 40_000] {
                let what = format!("{} {} {columns}", device.name, dtype.name());
                for nothing in [f32::NAN, NONE] {
                    let numbers: Vec<f32> = (0..columns).map(|column| column as f32).collect();
                    let rows = [numbers, vec![nothing; columns]];
                    check(&what, likeliest(&rows, dtype, &device.device));
                    let rows = [rows[1].clone(), rows[0].clone()];
                    check(&what, likeliest(&rows, dtype, &device.device));
                }
            }
        }
    }
}

/// Argmax treats NaN as −∞, as sampling does.
#[test]
fn argmax_ignores_nan() {
    for device in devices() {
        for columns in [5, 300, 40_000] {
            let row = |fill: f32, numbers: &[(usize, f32)]| {
                let mut row = vec![fill; columns];
                numbers.iter().for_each(|(at, number)| row[*at] = *number);
                row
            };
            let last = columns - 1;
            let rows = [
                row(f32::NAN, &[(last, -1e30)]),
                row(f32::NAN, &[(1, -7.0), (2, -5.0), (3, -5.0)]),
                row(NONE, &[(0, f32::NAN), (2, -1.0)]),
                row(0.0, &[(0, f32::NAN), (last, f32::NAN)]),
                row(f32::NAN, &[(3, f32::INFINITY), (4, 1.0)]),
            ];
            let found =
                likeliest(&rows, DType::F32, &device.device).expect("every row has a finite logit");
            let expected = [last as u32, 2, 2, 1, 3];
            assert_eq!(found, expected, "{} {columns}", device.name);
        }
    }
}

/// Argmax finds a logit that is the lowest finite number. Models set the logits of forbidden tokens to this number.
#[test]
fn argmax_of_the_lowest_finite_logit_is_found() {
    for device in devices() {
        for columns in [2, 300, 40_000] {
            let last = columns - 1;
            let mut rows = vec![vec![f32::MIN; columns], vec![NONE; columns]];
            rows[1][last] = f32::MIN;
            let found =
                likeliest(&rows, DType::F32, &device.device).expect("every row has a finite logit");
            assert_eq!(found, [0, last as u32], "{} {columns}", device.name);
        }
    }
}

/// A launch grid allows a limited number of cubes (thread blocks) per dimension. Argmax and sampling give the expected
/// tokens even for more rows than this limit. The number of rows is prime, so it is not a product of two smaller grid
/// dimensions.
#[test]
fn argmax_and_sampling_of_more_rows_than_a_grid_dimension_are_right() {
    const ROWS: u32 = 131_071;
    let likely = |row: u32| row / 3 % 2;
    for device in devices() {
        let rows: Vec<f32> = (0..ROWS)
            .flat_map(|row| [1.0 - likely(row) as f32, likely(row) as f32])
            .map(|is_likely| 100.0 * is_likely)
            .collect();
        let data = TensorData::new(rows, [ROWS as usize, 1, 2]);
        let logits = Tensor::<3>::from_data(data, &device.device);
        let expected: Vec<u32> = (0..ROWS).map(likely).collect();
        let found = Next::of(logits.clone())
            .argmax()
            .expect("every row has a finite logit");
        assert!(found == expected, "{}", device.name);
        let sampling = Sampling {
            temperature: 1.0,
            seed: Some(3),
            ..Sampling::greedy()
        };
        let mut samplers = vec![Sampler::new(&sampling); ROWS as usize];
        let found = Next::of(logits)
            .sample(&mut samplers)
            .expect("every row has a finite logit");
        assert!(found == expected, "{}", device.name);
    }
}

/// Returns a copy of a fixture whose tensor `name` has NaN in the row `row`, or in all rows if `row` is `None`.
pub fn spoiled(fixture: &str, name: &str, row: Option<usize>, device: &Device) -> (Folder, Gemma4) {
    let folder = Folder::copy(fixture);
    folder.edit(|tensors| {
        let tensor = tensors.get_mut(name).expect("the tensor exists");
        let row_bytes = tensor.bytes.len() / tensor.shape[0];
        let bytes = match row {
            Some(row) => &mut tensor.bytes[row * row_bytes..][..row_bytes],
            None => &mut tensor.bytes[..],
        };
        for number in bytes.as_chunks_mut::<4>().0 {
            *number = f32::NAN.to_le_bytes();
        }
    });
    let gemma = Gemma4::load(folder.path(), device, LoadOptions::new().dtype(DType::F32));
    (folder, gemma.expect("the checkpoint is valid"))
}

#[test]
fn generate_with_nan_weights_is_an_error() {
    for device in devices() {
        for (name, tensor) in [
            ("dense-ple", "model.norm.weight"),
            ("dense-ple", "model.layers.2.self_attn.q_proj.weight"),
            ("moe", "model.layers.1.mlp.up_proj.weight"),
        ] {
            let (_folder, gemma) = spoiled(name, tensor, None, &device.device);
            for sampling in [
                Sampling::greedy(),
                Sampling {
                    temperature: 1.0,
                    ..Sampling::greedy()
                },
            ] {
                let mut options = greedy(&gemma, 8);
                options.sampling = sampling;
                let outcome =
                    gemma.generate(vec![2, 5, 7], &options, |_| ControlFlow::Continue(()));
                check(&format!("{} {tensor}", device.name), outcome);
            }
        }
    }
}

/// Generation ends with an error if a decode step reads a token whose per-layer embedding is NaN. The prompt does not
/// contain that token, so the prefill does not read its embedding.
#[test]
fn generate_with_a_nan_embedding_is_an_error() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let generated = &fixture.generated;
        let new = |token: &&u32| !fixture.prompt.contains(*token);
        let token = *generated.iter().find(new).expect("a new token");
        let table = "model.embed_tokens_per_layer.weight";
        let (_folder, gemma) = spoiled("dense-ple", table, Some(token as usize), &device.device);
        for graph_capture in [true, false] {
            let mut options = greedy(&gemma, generated.len());
            options.graph_capture = graph_capture;
            let prompt = fixture.prompt.clone();
            let mut seen = Vec::new();
            let outcome = gemma.generate(prompt, &options, |token| {
                seen.push(token.id);
                ControlFlow::Continue(())
            });
            check(device.name, outcome);
            assert_eq!(seen.last(), Some(&token), "{}: {seen:?}", device.name);
        }
    }
}
