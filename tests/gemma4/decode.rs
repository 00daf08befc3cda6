//! Tests that decoding a text token by token gives the same logits as one forward over the text. The cases decode with
//! the decode kernels or with the model's layers, and with or without CUDA graph capture. A batch has one or several
//! sequences, of equal or different lengths. The texts are longer than the window and than the allocated buffers.

use crate::devices::devices;
use crate::fixture::{Fixture, assert_close, greedy, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{Cache, DecodeMode, Gemma4, GenerateOptions, Logits, Prompt, Sampling};
use std::ops::ControlFlow;

/// The fixtures with the batch sizes to test. The decode kernels support at most 8 sequences, so a batch of 9 exceeds their
/// limit.
const FIXTURES: [(&str, &[usize]); 4] = [
    ("dense-ple", &[1, 3, 8, 9]),
    ("dense-keqv", &[2]),
    ("moe", &[2]),
    ("realhead-ple", &[1]),
];

/// Returns true if the device runs CubeCL kernels.
fn has_kernels(device: &Device) -> bool {
    *device != Device::flex()
}

/// Prefills `cache` in one forward with the first `prefix` tokens of each sequence in `rows`. Then decodes the
/// remaining tokens. Returns two lists with one entry per decode step: the logits, `[batch · vocabulary]`, and the
/// decode mode.
fn decode(
    gemma: &Gemma4,
    mut cache: Cache,
    rows: &[Vec<u32>],
    prefix: usize,
    graph_capture: bool,
    device: &Device,
) -> (Vec<Vec<f32>>, Vec<DecodeMode>) {
    let first: Vec<&[u32]> = rows.iter().map(|row| &row[..prefix]).collect();
    gemma
        .model()
        .step(tokens(&first, device), &mut cache, Logits::None)
        .expect("the step succeeds");
    let mut decoder = gemma.model().decoder(&mut cache);
    if !graph_capture {
        decoder = decoder.without_graph_capture();
    }
    let (mut logits, mut modes) = (Vec::new(), Vec::new());
    for column in prefix..rows[0].len() {
        let column: Vec<u32> = rows.iter().map(|row| row[column]).collect();
        let next = decoder.step(&column).expect("the step succeeds");
        logits.push(next.logits().expect("the logits are readable"));
        modes.push(decoder.mode());
    }
    assert_eq!(cache.len(), rows[0].len());
    (logits, modes)
}

/// Returns different texts for the sequences of a batch.
fn rows(fixture: &Fixture, batch: usize) -> Vec<Vec<u32>> {
    let whole = [&fixture.prompt[..], &fixture.generated].concat();
    (0..batch)
        .map(|row| {
            let mut text = whole.clone();
            text.rotate_left(row);
            text
        })
        .collect()
}

#[test]
fn decode_step_by_step_equals_one_pass() {
    for device in devices() {
        for (name, batches) in FIXTURES {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            let vocabulary = gemma.config().vocab_size;
            for &batch in batches {
                let rows = rows(&fixture, batch);
                let at_once: Vec<Vec<f32>> = rows
                    .iter()
                    .map(|row| {
                        values(
                            gemma
                                .model()
                                .forward(tokens(&[row], &device.device))
                                .expect("the tokens are in the vocabulary"),
                        )
                    })
                    .collect();
                let kinds = [(false, true), (false, false), (true, true), (true, false)];
                for (compact, graph_capture) in kinds {
                    if compact && !gemma.config().attention_k_eq_v {
                        continue;
                    }
                    let padding = vec![0; batch];
                    let cache = match compact {
                        true => gemma.model().compact_cache(padding),
                        false => gemma.model().cache(padding),
                    };
                    let (found, modes) =
                        decode(&gemma, cache, &rows, 5, graph_capture, &device.device);
                    let what = format!(
                        "{name} {} batch {batch} graph {graph_capture} compact {compact}",
                        device.name
                    );
                    for (step, found) in found.iter().enumerate() {
                        for (found, row) in found.chunks(vocabulary).zip(&at_once) {
                            let expected = &row[(5 + step) * vocabulary..][..vocabulary];
                            assert_close(found, expected, &format!("{what} step {step}"));
                        }
                    }
                    let by_kernels = has_kernels(&device.device) && batch <= 8;
                    let expected = match (by_kernels, graph_capture) {
                        (false, _) => DecodeMode::Layers,
                        (true, false) => DecodeMode::Kernels,
                        (true, true) => DecodeMode::Graph,
                    };
                    assert_eq!(modes.last(), Some(&expected), "{what}");
                }
            }
        }
    }
}

/// Left-padded sequences of a batch give the same logits as each sequence alone. The padding consists of ordinary tokens, so
/// a kernel that reads padding would change the logits.
#[test]
fn decode_left_padded_batch_equals_single_sequences() {
    for device in devices() {
        for (name, spare, compact) in [
            ("dense-ple", 0, false),
            ("dense-ple", 3, false),
            ("dense-keqv", 0, true),
            ("moe", 0, false),
        ] {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            let model = gemma.model();
            let whole = [&fixture.prompt[..], &fixture.generated].concat();
            // After the prefill of `prefix` columns, the first text is longer than the window, the third has two
            // tokens, and the fourth is only padding.
            let prefix = whole.len() - 12;
            let padding = [0, 3, prefix - 2, prefix];
            let cache = match compact {
                true => model.compact_cache(padding.to_vec()),
                false => model.cache(padding.to_vec()),
            };
            let mut cache = cache.forgetting(spare);
            let rows: Vec<Vec<u32>> = padding
                .iter()
                .map(|padding| [vec![7; *padding], whole[*padding..].to_vec()].concat())
                .collect();
            let columns = |range: std::ops::Range<usize>| {
                let columns: Vec<&[u32]> = rows.iter().map(|row| &row[range.clone()]).collect();
                tokens(&columns, &device.device)
            };
            let first = model.step(columns(0..prefix), &mut cache, Logits::None);
            first.expect("the step succeeds");
            let mut found: Vec<Vec<f32>> = Vec::new();
            let mut modes = Vec::new();
            // The first decoder decodes six tokens, and the second decoder decodes the last tokens. Between the two,
            // one step runs the model's layers without the decode kernels. The layers must find the keys and values
            // that the first decoder wrote.
            for (start, end) in [(prefix, prefix + 6), (prefix + 7, whole.len())] {
                let mut decoder = model.decoder(&mut cache);
                for column in start..end {
                    let column: Vec<u32> = rows.iter().map(|row| row[column]).collect();
                    let next = decoder.step(&column).expect("the step succeeds");
                    found.push(next.logits().expect("the logits are readable"));
                    modes.push(decoder.mode());
                }
                if end < whole.len() {
                    let logits = model.step(columns(end..end + 1), &mut cache, Logits::All);
                    found.push(values(
                        logits
                            .expect("the step succeeds")
                            .expect("logits were requested"),
                    ));
                }
            }
            let what = format!("{name} {} spare {spare}", device.name);
            let vocabulary = gemma.config().vocab_size;
            for (row, padding) in padding.into_iter().enumerate() {
                let alone = model.forward(tokens(&[&whole[padding..]], &device.device));
                let alone = values(alone.expect("the tokens are in the vocabulary"));
                for (step, found) in found.iter().enumerate() {
                    let found = &found[row * vocabulary..][..vocabulary];
                    let expected = &alone[(prefix + step - padding) * vocabulary..][..vocabulary];
                    assert_close(found, expected, &format!("{what} row {row} step {step}"));
                }
            }
            let expected = match has_kernels(&device.device) {
                true => DecodeMode::Graph,
                false => DecodeMode::Layers,
            };
            assert_eq!(modes.last(), Some(&expected), "{what}");
        }
    }
}

/// In a batch of prompts of different lengths, each prompt gets the same answer as without the batch, with greedy
/// decoding and with sampling.
#[test]
fn generate_batch_of_ragged_prompts_equals_single_prompts() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let prompts: Vec<Prompt> = [0, 9, 2]
            .map(|left_out| fixture.prompt[left_out..].to_vec().into())
            .to_vec();
        let drawn = Sampling {
            temperature: 1.5,
            top_k: Some(40),
            repetition_penalty: 1.2,
            ..Sampling::greedy()
        };
        for sampling in [Sampling::greedy(), drawn] {
            let options = |seed| GenerateOptions {
                sampling: Sampling {
                    seed: Some(seed),
                    ..sampling.clone()
                },
                ..greedy(&gemma, 12)
            };
            let together = gemma
                .generate_batch(&prompts, &options(5))
                .expect("the generations succeed");
            for (prompt, (seed, found)) in prompts.iter().zip((5..).zip(together)) {
                let alone =
                    gemma.generate(
                        prompt.clone(),
                        &options(seed),
                        |_| ControlFlow::Continue(()),
                    );
                let alone = alone.expect("the generation succeeds");
                assert_eq!(found.tokens, alone.tokens, "{} {sampling:?}", device.name);
            }
        }
    }
}
