//! A token at a time gives what reading them at once gives: by kernels or through the layers, captured or not, alone or several
//! sequences at once, past the window, past the room that the buffers had, from either kind of cache.

use crate::devices::devices;
use crate::fixture::{Fixture, assert_close, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{Cache, DecodeMode, Gemma4, Logits};

/// The fixtures without experts, which decoders have kernels for, with batches as decoders may meet them: one sequence, a few, as many as kernels take, and more.
const DENSE: [(&str, &[usize]); 3] = [
    ("dense-ple", &[1, 3, 8, 9]),
    ("dense-keqv", &[2]),
    ("realhead-ple", &[1]),
];

/// Whether the device runs CubeCL kernels.
fn has_kernels(device: &Device) -> bool {
    *device != Device::flex()
}

/// Reads `rows` into `cache`, after `prefix` columns by a decoder; logits of each step, `[batch · vocabulary]`, and the modes.
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
        .expect("a step");
    let mut decoder = gemma.model().decoder(&mut cache);
    if !graph_capture {
        decoder = decoder.without_graph_capture();
    }
    let (mut logits, mut modes) = (Vec::new(), Vec::new());
    for column in prefix..rows[0].len() {
        let column: Vec<u32> = rows.iter().map(|row| row[column]).collect();
        let next = decoder.step(&column).expect("a step");
        logits.push(next.logits().expect("logits"));
        modes.push(decoder.mode());
    }
    assert_eq!(cache.len(), rows[0].len());
    (logits, modes)
}

/// Different texts for the sequences of a batch.
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
fn by_kernels_as_at_once() {
    for device in devices() {
        for (name, batches) in DENSE {
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
                                .expect("tokens within"),
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
