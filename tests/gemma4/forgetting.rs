//! Tests caches that remove their last columns, as after rejected draft tokens. A column is one token position of every
//! sequence. The cases combine the removal with padding, growing buffers and wrapped ring buffers. A ring buffer may
//! have spare slots in addition to the slots of the window. In some cases, a forward pass has more tokens than there
//! are spare slots.

use crate::devices::devices;
use crate::drafts::repeated;
use crate::fixture::{Fixture, TOLERANCE, assert_close, largest, tokens, values};
use attention_workspace::testing::devices::TestDevice;
use burn::tensor::{DType, Device};
use burn_gemma4::{Decoder, Gemma4, Logits};

/// Returns the logits of all positions of `text`, `[positions · vocabulary]`, from one forward pass.
fn at_once(gemma: &Gemma4, text: &[u32], device: &Device) -> Vec<f32> {
    let logits = gemma.model().forward(tokens(&[text], device));
    values(logits.expect("the tokens are in the vocabulary"))
}

fn read(decoder: &mut Decoder<'_>, tokens: &[u32]) -> Vec<f32> {
    let next = decoder.read(tokens).expect("the pass succeeds");
    next.logits().expect("the logits are readable")
}

/// The cache removes its last tokens, which lie on both sides of the end of a buffer's first allocation. Removing
/// tokens does not shrink the grown buffer, so the padding mask of a batch must also cover the buffer's unused slots.
#[test]
fn cache_forget_over_a_block_keeps_padded_batches() {
    let device = Device::flex();
    for name in ["dense-ple", "dense-keqv"] {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&device, DType::F32);
        let (model, vocabulary) = (gemma.model(), gemma.config().vocab_size);
        for compact in [false, gemma.config().attention_k_eq_v] {
            const PADDING: usize = 3;
            let padding = vec![0, PADDING];
            let cache = match compact {
                true => model.compact_cache(padding),
                false => model.cache(padding),
            };
            let mut cache = cache.forgetting(8);
            let text: Vec<u32> = (0..258).map(|index| 20 + index * 7 % 290).collect();
            let mut step = |first: usize, end: usize| {
                let now = tokens(&[&text[first..end], &text[first..end]], &device);
                let logits = model
                    .step(now, &mut cache, Logits::All)
                    .expect("the step succeeds");
                if end == 258 {
                    cache.forget(8).expect("the cache can forget the columns");
                }
                values(logits.expect("logits were requested"))
            };
            step(0, 250);
            step(250, 258);
            let found = step(250, 252);
            for (row, padding) in [0, PADDING].into_iter().enumerate() {
                let expected = at_once(&gemma, &text[padding..252], &device);
                assert_close(
                    &found[row * 2 * vocabulary..][..2 * vocabulary],
                    &expected[expected.len() - 2 * vocabulary..],
                    &format!("{name} compact {compact} row {row}"),
                );
            }
        }
    }
}

/// A ring buffer may have spare slots in addition to the slots of the window. If a forward pass has more tokens than
/// there are spare slots, some tokens overwrite slots that the pass's first query still needs. The cache must store
/// such tokens only after this query has read the slots.
#[test]
fn cache_pass_longer_than_the_spare_slots_keeps_the_logits() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let text = [&fixture.prompt[..], &fixture.generated].concat();
        let expected = at_once(&gemma, &text, &device.device);
        for spare in [0, 2, 4] {
            let mut cache = gemma.model().cache(vec![0]).forgetting(spare);
            let mut decoder = gemma.model().decoder(&mut cache);
            let mut found = Vec::new();
            let mut rest = &text[..];
            // The decode kernels process some of the portions, and the prefill operations process the others.
            for portion in [4, 1, 5, 3, 1].into_iter().cycle() {
                let (now, later) = rest.split_at(portion.min(rest.len()));
                found.extend(read(&mut decoder, now));
                rest = later;
                if rest.is_empty() {
                    break;
                }
            }
            let what = format!("{} spare {spare}", device.name);
            assert_close(&found, &expected, &what);
        }
    }
}

/// If all tokens are removed from the cache, the decoder starts a new text, and the decode kernels continue this new text.
#[test]
fn cache_forget_everything_starts_again() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let text = &fixture.prompt;
        let expected = at_once(&gemma, text, &device.device);
        let mut cache = gemma.model().cache(vec![0]).forgetting(8);
        let mut decoder = gemma.model().decoder(&mut cache);
        read(&mut decoder, &[60]);
        read(&mut decoder, &[61]);
        read(&mut decoder, &[62]);
        decoder.forget(3).expect("the cache can forget the columns");
        assert!(decoder.cache().is_empty());
        let found: Vec<f32> = text
            .iter()
            .flat_map(|token| read(&mut decoder, &[*token]))
            .collect();
        assert_close(&found, &expected, device.name);
    }
}

/// Each forward pass computes accepted and rejected tokens, and the cache then removes the rejected tokens. The logits equal
/// the logits of one forward over the accepted tokens. Every ring buffer wraps around with rejected tokens in it.
#[test]
fn cache_forgotten_tokens_leave_no_trace() {
    for device in devices() {
        for fixture in Fixture::all() {
            let gemma = fixture.load(&device.device, DType::F32);
            for compact in [false, gemma.config().attention_k_eq_v] {
                for graph_capture in [false, true] {
                    forget(&fixture, &gemma, &device, compact, graph_capture);
                }
            }
        }
    }
}

fn forget(
    fixture: &Fixture,
    gemma: &Gemma4,
    device: &TestDevice,
    compact: bool,
    graph_capture: bool,
) {
    const SPARE: usize = 8;
    let model = gemma.model();
    let text = [repeated(fixture), fixture.prompt.clone()].concat();
    let at_once = model.forward(tokens(&[&text], &device.device));
    let at_once = values(at_once.expect("the tokens are in the vocabulary"));
    let vocabulary = gemma.config().vocab_size;
    let cache = match compact {
        true => model.compact_cache(vec![0]),
        false => model.cache(vec![0]),
    };
    let mut cache = cache.forgetting(SPARE);
    let first = tokens(&[&text[..5]], &device.device);
    model
        .step(first, &mut cache, Logits::None)
        .expect("the step succeeds");
    let mut decoder = model.decoder(&mut cache);
    if !graph_capture {
        decoder = decoder.without_graph_capture();
    }
    // Each entry holds the number of accepted tokens and the number of rejected tokens of a forward pass. Some passes are
    // short enough for the decode kernels.
    let passes = [
        (1, 3),
        (2, 2),
        (4, 0),
        (1, 7),
        (1, 0),
        (3, 5),
        (1, 8),
        (8, 0),
    ];
    let mut read = 5;
    for (right, wrong) in passes.into_iter().cycle() {
        if read + right > text.len() {
            break;
        }
        let mut now = text[read..read + right].to_vec();
        now.extend((0..wrong).map(|index| 30 + (read + index) as u32 % 250));
        let next = decoder.read(&now).expect("the pass succeeds");
        let logits = next.logits().expect("the logits are readable");
        assert_eq!(logits.len(), now.len() * vocabulary);
        let expected = &at_once[read * vocabulary..(read + right) * vocabulary];
        let found = &logits[..right * vocabulary];
        let error = largest(found.iter().zip(expected).map(|(a, b)| a - b));
        let scale = largest(expected.iter().copied());
        assert!(
            error <= TOLERANCE * scale,
            "{} {} compact {compact} graph {graph_capture} at {read} + {right}: {error:e} of {scale:e}",
            fixture.name,
            device.name
        );
        decoder
            .forget(wrong)
            .expect("the cache can forget the columns");
        read += right;
        assert_eq!(decoder.cache().len(), read);
    }
}

/// Several sequences remove the same last tokens from their caches. The next logits equal the logits of sequences that never
/// had these tokens.
#[test]
fn cache_forget_in_batches_keeps_the_logits() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let model = gemma.model();
        let whole = [&fixture.prompt[..], &fixture.generated].concat();
        let rows: Vec<Vec<u32>> = (0..3)
            .map(|row| {
                let mut text = whole.clone();
                text.rotate_left(row);
                text
            })
            .collect();
        let vocabulary = gemma.config().vocab_size;
        let at_once = rows.iter().map(|row| {
            let logits = model.forward(tokens(&[row], &device.device));
            values(logits.expect("the tokens are in the vocabulary"))
        });
        let at_once: Vec<Vec<f32>> = at_once.collect();
        let mut cache = model.cache(vec![0; 3]).forgetting(2);
        let first: Vec<&[u32]> = rows.iter().map(|row| &row[..6]).collect();
        let first = tokens(&first, &device.device);
        model
            .step(first, &mut cache, Logits::None)
            .expect("the step succeeds");
        let mut decoder = model.decoder(&mut cache);
        for column in 6..whole.len() {
            let now: Vec<u32> = rows.iter().map(|row| row[column]).collect();
            let logits = decoder
                .step(&now)
                .expect("the step succeeds")
                .logits()
                .expect("the logits are readable");
            for (found, row) in logits.chunks(vocabulary).zip(&at_once) {
                let expected = &row[column * vocabulary..][..vocabulary];
                let error = largest(found.iter().zip(expected).map(|(a, b)| a - b));
                let scale = largest(expected.iter().copied());
                assert!(
                    error <= TOLERANCE * scale,
                    "{} at {column}: {error:e} of {scale:e}",
                    device.name
                );
            }
            let wrong = column % 3;
            for _ in 0..wrong {
                decoder.step(&[60, 70, 80]).expect("the step succeeds");
            }
            decoder
                .forget(wrong)
                .expect("the cache can forget the columns");
        }
    }
}

#[test]
fn cache_forget_of_more_than_the_spare_slots_is_refused() {
    let fixture = Fixture::open("dense-ple");
    let device = Device::flex();
    let gemma = fixture.load(&device, DType::F32);
    let mut cache = gemma.model().cache(vec![0]).forgetting(3);
    assert_eq!(cache.forgettable(), 0);
    let read = |cache: &mut burn_gemma4::Cache, count: usize| {
        let row = tokens(&[&fixture.prompt[..count]], &device);
        gemma
            .model()
            .step(row, cache, Logits::None)
            .expect("the step succeeds");
    };
    read(&mut cache, 2);
    assert_eq!(cache.forgettable(), 2);
    read(&mut cache, 9);
    assert_eq!(cache.forgettable(), 3);
    cache.forget(2).expect("the cache can forget two columns");
    assert_eq!((cache.len(), cache.forgettable()), (9, 1));
    let error = cache
        .forget(2)
        .expect_err("the cache can forget only one column")
        .to_string();
    assert_eq!(error, "count: is 2, but the cache can forget 1 columns");
    read(&mut cache, 1);
    assert_eq!(cache.forgettable(), 2);
    read(&mut cache, 2);
    assert_eq!(cache.forgettable(), 3);
    let mut usual = gemma.model().cache(vec![0]);
    read(&mut usual, 9);
    assert!(usual.forget(1).is_err());
    assert!(usual.forget(0).is_ok());
}
