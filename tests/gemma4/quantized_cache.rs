//! Tests the int8 KV cache, whose logits stay close to the logits with the full-precision cache. The tests cover prefill in
//! portions, decode kernels, graph capture, batches of sequences of different lengths, compact keys, draft tokens, and
//! session files. Head sizes that cannot be packed are refused.

use crate::devices::devices;
use crate::fixture::{Fixture, folder, greedy, largest, on_every_device, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Cache, CacheKind, DecodeMode, Drafts, Gemma4, Gemma4Config, Gemma4Error, Gemma4Model,
    GenerateOptions, Generation, KvPrecision, Logits, Prompt, SavedSession,
};
use std::{fs, ops::ControlFlow, path::Path};
use tempfile::TempDir;

/// The maximum root mean square of the difference between the logits with the int8 cache and the logits with the
/// full-precision cache. This maximum is relative to the root mean square of the logits with the full-precision cache.
/// The int8 codes of a row have an error of about 1/180 of the standard deviation of the row. The scores of the test
/// models have a standard deviation of 8, so the error changes the probabilities by about 5 %.
const BOUND: f32 = 0.06;

/// The maximum relative difference between two computations over the same text with an int8 cache. The two computations
/// may round differently in f32. If an element lies close to the midpoint between two codes, this rounding decides
/// which code the element gets.
const APART: f32 = 0.01;

fn kind(compact_keys: bool) -> CacheKind {
    CacheKind {
        compact_keys,
        precision: KvPrecision::Q8,
    }
}

fn cache(gemma: &Gemma4, compact_keys: bool, padding: Vec<usize>) -> Cache {
    let cache = gemma.model().cache_of(kind(compact_keys), padding);
    cache.expect("the head sizes can be packed")
}

/// Returns the largest difference between two elements, relative to the largest magnitude of the expected elements.
fn difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let error = largest(found.iter().zip(expected).map(|(a, b)| a - b));
    error / largest(expected.iter().copied())
}

/// Returns the root mean square of the differences, relative to the root mean square of the expected elements.
fn mean_difference(found: &[f32], expected: &[f32]) -> f32 {
    let squares = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(|x| x * x).sum::<f32>();
    let mut errors = found.iter().zip(expected).map(|(a, b)| a - b);
    (squares(&mut errors) / squares(&mut expected.iter().copied())).sqrt()
}

fn whole(fixture: &Fixture) -> Vec<u32> {
    [&fixture.prompt[..], &fixture.generated].concat()
}

/// Prefills `cache` with `sequence` in portions, and returns the logits of all positions. The list `portions` holds the
/// number of tokens of each portion. The list is repeated until the sequence ends.
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
        logits.extend(values(
            step.expect("the step succeeds")
                .expect("logits were requested"),
        ));
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    logits
}

/// Returns the values of the option `compact_keys` to test. With this option, the cache stores only the rotated
/// channels of a key. The option needs keys and values from the same projection, and the function then returns both
/// false and true. In other models the option has no effect, so the function returns only false.
fn compactions(gemma: &Gemma4) -> &'static [bool] {
    match gemma.config().attention_k_eq_v {
        true => &[false, true],
        false => &[false],
    }
}

/// The logits with the int8 cache are near the logits with the full-precision cache. Dividing the prefill into portions
/// does not change the logits. Devices that run CubeCL kernels compile new kernels for every number of rows, so only
/// one fixture runs on these devices.
#[test]
fn int8_cache_logits_stay_near_full_precision() {
    on_every_device(|fixture, gemma, device| {
        let is_flex = !device.is_cube();
        if !is_flex && fixture.name != "dense-keqv" {
            return;
        }
        let sequence = whole(fixture);
        let forward = gemma.model().forward(tokens(&[&sequence], &device.device));
        let expected = values(forward.expect("the tokens are in the vocabulary"));
        for &compact in compactions(gemma) {
            let new = || cache(gemma, compact, vec![0]);
            let read =
                |portions: &[usize]| by_portions(gemma, new(), &sequence, portions, &device.device);
            let at_once = read(&[sequence.len()]);
            let what = format!("{} {} compact {compact}", fixture.name, device.name);
            let error = mean_difference(&at_once, &expected);
            // In the MoE model, rounding may change which experts the router selects for a token. Such a change alters
            // the logits much more than rounding itself.
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

/// Over the int8 cache, the decode kernels give the same logits as a prefill by the layers of the model. The sequences
/// of a batch have different lengths, and every sequence is longer than the sliding window.
#[test]
fn int8_cache_decode_kernels_equal_the_layers() {
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
            model
                .step(first, &mut cache, Logits::None)
                .expect("the step succeeds");
            let mut decoder = model.decoder(&mut cache);
            let mut found = Vec::new();
            for column in prefix..whole.len() {
                let column: Vec<u32> = rows.iter().map(|row| row[column]).collect();
                let next = decoder.step(&column).expect("the step succeeds");
                found.push(next.logits().expect("the logits are readable"));
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
        .expect("the generation succeeds")
}

/// Draft tokens, prefill chunks and batches do not change the generated tokens.
#[test]
fn int8_cache_tokens_are_equal_with_drafts_chunks_and_batches() {
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
        let batch = gemma
            .generate_batch(&prompts, &plain)
            .expect("the generations succeed");
        assert_eq!(batch[0].tokens, expected.tokens, "{name} in a batch");
    }
}

/// A drafter that reads the int8 cache with compact keys does not change the generated tokens.
#[test]
fn int8_cache_with_drafter_leaves_the_tokens_unchanged() {
    for device in devices() {
        let fixture = Fixture::open("dense-keqv");
        let gemma = fixture.load(&device.device, DType::F32);
        let gemma = gemma.with_drafter(folder("assistant-keqv"));
        let gemma = gemma.expect("the drafter fits the model");
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

/// A session that is loaded from its file continues like the original session, also on an autodiff device. If the KV
/// cache in the file has another precision than the loaded session, the session prefills its text again.
#[test]
fn int8_cache_session_continues_from_its_file() {
    let flex = Device::flex();
    for (name, compact_keys, device) in [
        ("dense-ple", false, flex.clone()),
        ("dense-keqv", true, flex.clone()),
        ("dense-ple", false, flex.autodiff()),
    ] {
        let gemma = Fixture::open(name).load(&device, DType::F32);
        let kept = TempDir::new().expect("a temporary folder");
        let path = kept.path().join("session");
        let trunk: Vec<u32> = (0..30).map(|index| 20 + index * 7 % 290).collect();
        let whole = GenerateOptions {
            compact_keys,
            ..greedy(&gemma, 6)
        };
        let options = quantized(&whole);
        let mut session = gemma.session();
        let first = session.generate(trunk.clone(), &options, |_| ControlFlow::Continue(()));
        let first = first.expect("the generation succeeds");
        session.save(&path, &[]).expect("the save succeeds");
        let prompt = [&trunk[..], &first.tokens, &[50, 60, 50]].concat();
        for (options, is_read_anew) in [(&options, false), (&whole, true)] {
            let saved = SavedSession::read(gemma.model(), &path).expect("the session is readable");
            let mut again = gemma.resume(saved);
            let found = again.generate(prompt.clone(), options, |_| ControlFlow::Continue(()));
            let found = found.expect("the generation succeeds");
            assert_eq!(found.tokens, generate(&gemma, &prompt, options).tokens);
            let read = found.timings.prefill_tokens;
            assert_eq!(read == prompt.len(), is_read_anew, "{name}: {read}");
        }
    }
}

/// Writes a session file with an int8 KV cache to `path`.
fn save_words(gemma: &Gemma4, path: &Path) {
    let mut session = gemma.session();
    let options = quantized(&greedy(gemma, 2));
    let found = session.generate(vec![20, 30, 40], &options, |_| ControlFlow::Continue(()));
    found.expect("the generation succeeds");
    session.save(path, &[]).expect("the save succeeds");
}

/// If the packed keys in a session file have a wrong dtype, the error says that the file is malformed. The error must not say
/// that the file belongs to another model.
#[test]
fn int8_cache_session_of_wrong_dtype_is_malformed() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let kept = TempDir::new().expect("a temporary folder");
    let path = kept.path().join("session");
    save_words(&gemma, &path);
    let bytes = fs::read(&path).expect("the file is readable");
    let (of_words, spoiled) = (br#""dtype":"I32""#, br#""dtype":"F32""#);
    let at = bytes
        .windows(of_words.len())
        .position(|part| part == of_words);
    let at = at.expect("the file has packed keys");
    let bytes = [&bytes[..at], spoiled, &bytes[at + of_words.len()..]].concat();
    fs::write(&path, bytes).expect("the file is written");
    let error =
        SavedSession::read(gemma.model(), &path).expect_err("the packed keys have a wrong dtype");
    let text = error.to_string();
    assert!(matches!(error, Gemma4Error::Malformed { .. }), "{text}");
    assert!(
        text.contains("is in F32; in int8 it should be in i32"),
        "{text}"
    );
}

/// A session with an int8 cache is refused if the session was computed in another dtype than the dtype of the model.
/// The session file records the dtype in which the session was computed.
#[test]
fn int8_cache_session_computed_in_another_dtype_is_refused() {
    let fixture = Fixture::open("dense-ple");
    let [gemma, other] =
        [DType::F32, DType::BF16].map(|dtype| fixture.load(&Device::flex(), dtype));
    let kept = TempDir::new().expect("a temporary folder");
    let path = kept.path().join("session");
    save_words(&gemma, &path);
    SavedSession::read(gemma.model(), &path).expect("the dtype is the same");
    let error =
        SavedSession::read(other.model(), &path).expect_err("the session has another dtype");
    let text = error.to_string();
    assert!(matches!(error, Gemma4Error::Unsupported { .. }), "{text}");
    assert!(text.contains("computed in f32"), "{text}");
}

/// A slot of the cache holds the keys and values of one token. A key or value element takes one byte. For each head,
/// the slot has 4 more bytes for the scale of the key, and 4 for the scale of the value. A compact key stores only its
/// rotated channels, and shares the scale of its value.
#[test]
fn int8_cache_bytes_are_one_a_number_and_four_a_row() {
    let device = Device::flex();
    let bytes = |name, compact| {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&device, DType::F32);
        let mut cache = cache(&gemma, compact, vec![0]);
        let row = tokens(&[&fixture.prompt], &device);
        let step = gemma.model().step(row, &mut cache, Logits::None);
        step.expect("the step succeeds");
        cache.bytes()
    };
    // Each of two sliding layers has 8 slots (token positions) with 32 columns, and one full layer has 256 slots with 64
    // columns. Each slot has a key and a value.
    assert_eq!(
        bytes("dense-ple", false),
        2 * (2 * 8 * (32 + 4) + 256 * (64 + 4))
    );
    let sliding = 2 * 3 * 2 * 8 * (32 + 4);
    assert_eq!(bytes("dense-keqv", false), sliding + 2 * 256 * 2 * (64 + 4));
    assert_eq!(bytes("dense-keqv", true), sliding + 2 * 256 * (64 + 16 + 4));
}

#[test]
fn int8_cache_of_head_size_that_is_no_multiple_of_four_is_refused() {
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
        .expect("the full-precision cache takes any head size");
    let error = model
        .cache_of(kind(false), vec![0])
        .expect_err("the input is refused");
    let Gemma4Error::Argument { argument, reason } = error else {
        panic!("{error}")
    };
    assert_eq!(argument, "kv_precision");
    assert!(reason.contains("heads of 18"), "{reason}");
}
