//! Keys and values in int8: logits near those of the whole ones, however a text is read — by portions, by a decoder's kernels, captured or
//! not, in batches of any lengths, with compact keys, with drafts, from a session's file; less memory; and what has no words is refused.

use crate::devices::devices;
use crate::fixture::{Fixture, folder, greedy, largest, on_every_device, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Cache, CacheKind, DecodeMode, Drafts, Gemma4, Gemma4Config, Gemma4Error, Gemma4Model,
    GenerateOptions, Generation, KvPrecision, Logits, Prompt, SavedSession,
};
use std::{fs, ops::ControlFlow, path::Path};
use tempfile::TempDir;

/// How far logits may be from those over whole keys and values, in root mean square, relative to the logits': a code errs by a 254th of its
/// row's largest number at most, which is 1/180 of the row's deviation, and these models' scores, of random weights, have a deviation of 8: so
/// that probabilities are off by some 5 %.
const BOUND: f32 = 0.06;

/// How far two ways of reading the same quantized keys may be apart: where a number lies between two codes, a rounding in f32 decides.
const APART: f32 = 0.01;

fn kind(compact_keys: bool) -> CacheKind {
    CacheKind {
        compact_keys,
        precision: KvPrecision::Q8,
    }
}

fn cache(gemma: &Gemma4, compact_keys: bool, padding: Vec<usize>) -> Cache {
    let cache = gemma.model().cache_of(kind(compact_keys), padding);
    cache.expect("heads of words")
}

/// The largest difference, relative to the largest number.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let error = largest(found.iter().zip(expected).map(|(a, b)| a - b));
    error / largest(expected.iter().copied())
}

/// The root mean square of the differences, relative to that of the numbers.
fn mean_difference(found: &[f32], expected: &[f32]) -> f32 {
    let squares = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>();
    let mut errors = found.iter().zip(expected).map(|(a, b)| a - b);
    (squares(&mut errors) / squares(&mut expected.iter().copied())).sqrt()
}

fn whole(fixture: &Fixture) -> Vec<u32> {
    [&fixture.prompt[..], &fixture.generated].concat()
}

/// The logits of all of `sequence`, read into `cache` by portions whose lengths come round and round.
fn by_portions(
    gemma: &Gemma4,
    mut cache: Cache,
    sequence: &[u32],
    portions: &[usize],
    device: &Device,
) -> Vec<f32> {
    let (mut logits, mut rest) = (Vec::new(), sequence);
    for portion in portions.iter().cycle() {
        let (now, later) = rest.split_at((*portion).min(rest.len()));
        let now = tokens(&[now], device);
        let step = gemma.model().step(now, &mut cache, Logits::All);
        logits.extend(values(step.expect("a step").expect("logits")));
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    logits
}

/// The caches that keep different things.
fn compactions(gemma: &Gemma4) -> &'static [bool] {
    match gemma.config().attention_k_eq_v {
        true => &[false, true],
        false => &[false],
    }
}

/// On devices with kernels the layout with the most to it alone: every number of rows is compiled anew there.
#[test]
fn logits_stay_near_however_a_text_is_read() {
    on_every_device(|fixture, gemma, device| {
        let is_flex = !device.is_cube();
        if !is_flex && fixture.name != "dense-keqv" {
            return;
        }
        let sequence = whole(fixture);
        let forward = gemma.model().forward(tokens(&[&sequence], &device.device));
        let expected = values(forward.expect("tokens within"));
        for &compact in compactions(gemma) {
            let new = || cache(gemma, compact, vec![0]);
            let read =
                |portions: &[usize]| by_portions(gemma, new(), &sequence, portions, &device.device);
            let at_once = read(&[sequence.len()]);
            let what = format!("{} {} compact {compact}", fixture.name, device.name);
            let error = mean_difference(&at_once, &expected);
            // Another expert, once a router's choice is a close one, is another number altogether.
            let bound = if fixture.name == "moe" { 0.5 } else { BOUND };
            assert!(error > 0.0 && error < bound, "{what}: {error}");
            let all = [&[24, 1][..], &[7, 1, 1], &[1]];
            for portions in if is_flex { &all[..] } else { &all[..1] } {
                let apart = difference(&read(portions), &at_once);
                assert!(apart < APART, "{what} by {portions:?}: {apart}");
            }
        }
    });
}

/// Batches of equal lengths and of others, past the window and past the room that buffers had, against each sequence through the layers alone.
#[test]
fn decoders_read_what_the_layers_read() {
    for device in devices() {
        for (name, compact, padding) in [
            ("dense-ple", false, &[0, 3, 22][..]),
            ("dense-keqv", true, &[0, 5]),
        ] {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            let whole = whole(&fixture);
            let (model, vocabulary) = (gemma.model(), gemma.config().vocab_size);
            let mut cache = cache(&gemma, compact, padding.to_vec());
            let prefix = whole.len() - 12;
            let rows: Vec<Vec<u32>> = padding
                .iter()
                .map(|padding| [vec![7; *padding], whole[*padding..].to_vec()].concat())
                .collect();
            let first: Vec<&[u32]> = rows.iter().map(|row| &row[..prefix]).collect();
            let first = tokens(&first, &device.device);
            model.step(first, &mut cache, Logits::None).expect("a step");
            let mut decoder = model.decoder(&mut cache);
            let mut found = Vec::new();
            for column in prefix..whole.len() {
                let column: Vec<u32> = rows.iter().map(|row| row[column]).collect();
                let next = decoder.step(&column).expect("a step");
                found.push(next.logits().expect("logits"));
            }
            let mode = decoder.mode();
            let what = format!("{name} {} {padding:?} compact {compact}", device.name);
            let expected = match device.is_cube() {
                true => DecodeMode::Graph,
                false => DecodeMode::Layers,
            };
            assert_eq!(mode, expected, "{what}");
            for (row, &padding) in padding.iter().enumerate() {
                let text = &whole[padding..];
                let alone = crate::quantized_cache::cache(&gemma, compact, vec![0]);
                let alone = by_portions(&gemma, alone, text, &[text.len()], &device.device);
                for (step, found) in found.iter().enumerate() {
                    let found = &found[row * vocabulary..][..vocabulary];
                    let expected = &alone[(prefix + step - padding) * vocabulary..];
                    let apart = difference(found, &expected[..vocabulary]);
                    assert!(apart < APART, "{what} row {row} step {step}: {apart}");
                }
            }
        }
    }
}

fn quantized(options: &GenerateOptions) -> GenerateOptions {
    GenerateOptions {
        kv_precision: KvPrecision::Q8,
        ..options.clone()
    }
}

fn generate(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Generation {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("a generation")
}

/// Drafts, chunks and batches change no token.
#[test]
fn tokens_are_the_same_with_drafts_and_by_chunks() {
    for name in ["dense-ple", "dense-keqv", "moe"] {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&Device::flex(), DType::F32);
        let plain = quantized(&greedy(&gemma, 12));
        let prompt = [&fixture.prompt[..], &fixture.generated, &fixture.prompt].concat();
        let expected = generate(&gemma, &prompt, &plain);
        for draft_tokens in [None, Some(8)] {
            let drafted = GenerateOptions {
                drafts: Drafts::Lookup,
                draft_tokens,
                ..plain.clone()
            };
            let found = generate(&gemma, &prompt, &drafted);
            assert_eq!(found.tokens, expected.tokens, "{name} {draft_tokens:?}");
        }
        let chunked = GenerateOptions {
            prefill_chunk: Some(9),
            ..plain.clone()
        };
        let found = generate(&gemma, &prompt, &chunked);
        assert_eq!(found.tokens, expected.tokens, "{name} in chunks");
        let prompts: Vec<Prompt> = vec![prompt.clone().into(), prompt[6..].to_vec().into()];
        let batch = gemma.generate_batch(&prompts, &plain).expect("generations");
        assert_eq!(batch[0].tokens, expected.tokens, "{name} in a batch");
    }
}

/// A drafter that reads them, with compact keys, too.
#[test]
fn drafters_change_no_token() {
    for device in devices() {
        let fixture = Fixture::open("dense-keqv");
        let gemma = fixture.load(&device.device, DType::F32);
        let gemma = gemma.with_drafter(folder("assistant-keqv"));
        let gemma = gemma.expect("its drafter");
        let plain = GenerateOptions {
            compact_keys: true,
            ..quantized(&greedy(&gemma, 10))
        };
        let drafted = GenerateOptions {
            drafts: Drafts::Drafter,
            draft_tokens: Some(2),
            ..plain.clone()
        };
        let expected = generate(&gemma, &fixture.prompt, &plain);
        let found = generate(&gemma, &fixture.prompt, &drafted);
        assert_eq!(found.tokens, expected.tokens, "{}", device.name);
        assert!(found.drafts.drafted > 0, "{}", device.name);
    }
}

/// A session goes on from its file as it would have, also where gradients are tracked; under another precision, its text is read anew.
#[test]
fn sessions_are_kept_as_they_are() {
    let flex = Device::flex();
    for (name, compact_keys, device) in [
        ("dense-ple", false, flex.clone()),
        ("dense-keqv", true, flex.clone()),
        ("dense-ple", false, flex.autodiff()),
    ] {
        let gemma = Fixture::open(name).load(&device, DType::F32);
        let kept = TempDir::new().expect("a folder");
        let path = kept.path().join("session");
        let trunk: Vec<u32> = (0..30).map(|index| 20 + index * 7 % 290).collect();
        let whole = GenerateOptions {
            compact_keys,
            ..greedy(&gemma, 6)
        };
        let options = quantized(&whole);
        let mut session = gemma.session();
        let first = session.generate(trunk.clone(), &options, |_| ControlFlow::Continue(()));
        let first = first.expect("a generation");
        session.save(&path, &[]).expect("saved");
        let prompt = [&trunk[..], &first.tokens, &[50, 60, 50]].concat();
        for (options, is_read_anew) in [(&options, false), (&whole, true)] {
            let saved = SavedSession::read(gemma.model(), &path).expect("a session");
            let mut again = gemma.resume(saved);
            let found = again.generate(prompt.clone(), options, |_| ControlFlow::Continue(()));
            let found = found.expect("a generation");
            assert_eq!(found.tokens, generate(&gemma, &prompt, options).tokens);
            let read = found.timings.prefill_tokens;
            assert_eq!(read == prompt.len(), is_read_anew, "{name}: {read}");
        }
    }
}

/// Writes a session whose keys are in int8.
fn save_words(gemma: &Gemma4, path: &Path) {
    let mut session = gemma.session();
    let options = quantized(&greedy(gemma, 2));
    let found = session.generate(vec![20, 30, 40], &options, |_| ControlFlow::Continue(()));
    found.expect("a generation");
    session.save(path, &[]).expect("saved");
}

/// Words that are no words are a fault of the file, not another model's.
#[test]
fn words_of_another_dtype_are_refused() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let kept = TempDir::new().expect("a folder");
    let path = kept.path().join("session");
    save_words(&gemma, &path);
    let bytes = fs::read(&path).expect("a file");
    let (of_words, spoiled) = (br#""dtype":"I32""#, br#""dtype":"F32""#);
    let at = bytes
        .windows(of_words.len())
        .position(|part| part == of_words);
    let at = at.expect("words");
    let bytes = [&bytes[..at], spoiled, &bytes[at + of_words.len()..]].concat();
    fs::write(&path, bytes).expect("a file");
    let error = SavedSession::read(gemma.model(), &path).expect_err("no words");
    let text = error.to_string();
    assert!(matches!(error, Gemma4Error::Malformed { .. }), "{text}");
    assert!(
        text.contains("is in F32; in int8 it should be in i32"),
        "{text}"
    );
}

/// Words do not tell in what they were computed.
#[test]
fn words_that_another_dtype_was_computed_in_are_refused() {
    let fixture = Fixture::open("dense-ple");
    let [gemma, other] =
        [DType::F32, DType::BF16].map(|dtype| fixture.load(&Device::flex(), dtype));
    let kept = TempDir::new().expect("a folder");
    let path = kept.path().join("session");
    save_words(&gemma, &path);
    SavedSession::read(gemma.model(), &path).expect("the same");
    let error = SavedSession::read(other.model(), &path).expect_err("another dtype");
    let text = error.to_string();
    assert!(matches!(error, Gemma4Error::Unsupported { .. }), "{text}");
    assert!(text.contains("computed in f32"), "{text}");
}

/// A byte a number, and 4 a slot and head.
#[test]
fn memory() {
    let device = Device::flex();
    let bytes = |name, compact| {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&device, DType::F32);
        let mut cache = cache(&gemma, compact, vec![0]);
        let row = tokens(&[&fixture.prompt], &device);
        let step = gemma.model().step(row, &mut cache, Logits::None);
        step.expect("a step");
        cache.bytes()
    };
    // Two sliding layers of 8 slots by 32 columns, one full layer of a block of 256 by 64; keys and values.
    assert_eq!(
        bytes("dense-ple", false),
        2 * (2 * 8 * (32 + 4) + 256 * (64 + 4))
    );
    let sliding = 2 * 3 * 2 * 8 * (32 + 4);
    assert_eq!(bytes("dense-keqv", false), sliding + 2 * 256 * 2 * (64 + 4));
    assert_eq!(bytes("dense-keqv", true), sliding + 2 * 256 * (64 + 16 + 4));
}

#[test]
fn heads_without_words_are_refused() {
    let config = Gemma4Config {
        vocab_size: 50,
        hidden_size: 32,
        intermediate_size: 64,
        num_attention_heads: 2,
        sliding_head_dim: 18,
        global_head_dim: 32,
        num_kv_shared_layers: 0,
        hidden_size_per_layer_input: 0,
        ..Gemma4Config::e2b()
    };
    let model = Gemma4Model::new(&config, &Device::flex());
    model
        .cache_of(CacheKind::default(), vec![0])
        .expect("whole ones");
    let error = model.cache_of(kind(false), vec![0]).expect_err("refused");
    let Gemma4Error::Argument { argument, reason } = error else {
        panic!("{error}")
    };
    assert_eq!(argument, "kv_precision");
    assert!(reason.contains("heads of 18"), "{reason}");
}
