//! Tests the options that limit the length of a text or exclude tokens from its beginning: `min_new_tokens`,
//! `min_length`, `max_length` and `begin_suppress_tokens`. The options work as in the logits processors of Hugging Face
//! Transformers.

use crate::devices::devices;
use crate::fixture::{Fixture, greedy, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{Drafts, FinishReason, Gemma4, GenerateOptions, LoadOptions, Prompt, Sampling};
use std::ops::ControlFlow;

const COUNT: usize = 8;

fn generate(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
        .tokens
}

/// Returns the greedily generated tokens, each computed by a forward over the whole text. A token is allowed only if
/// `is_allowed(count, token)` is true, where `count` is the number of tokens generated so far.
fn expected(
    gemma: &Gemma4,
    prompt: &[u32],
    stop: &[u32],
    is_allowed: impl Fn(usize, u32) -> bool,
) -> Vec<u32> {
    let mut text = prompt.to_vec();
    let mut chosen = Vec::new();
    while chosen.len() < COUNT && !chosen.last().is_some_and(|last| stop.contains(last)) {
        let input = tokens(&[&text], &gemma.device());
        let logits = values(
            gemma
                .model()
                .forward(input)
                .expect("the tokens are in the vocabulary"),
        );
        let last = &logits[logits.len() - gemma.config().vocab_size..];
        let allowed = (0u32..)
            .zip(last)
            .filter(|(token, _)| is_allowed(chosen.len(), *token));
        let (token, _) = allowed
            .reduce(|best, next| if next.1 > best.1 { next } else { best })
            .expect("there is a token");
        chosen.push(token);
        text.push(token);
    }
    chosen
}

/// Each length option gives the same tokens as [`expected`], which runs a forward over the whole text for each token
/// and excludes suppressed tokens. Each text is generated three times: without draft tokens, with draft tokens, and in
/// a batch.
#[test]
fn length_options_suppress_tokens_as_transformers_does() {
    let fixture = Fixture::open("dense-ple");
    let prompt = &fixture.prompt[..];
    let reference = fixture.load(&Device::flex(), DType::F32);
    let free = expected(&reference, prompt, &[], |_, _| true);
    // The stop tokens are the first and the third token of the text that the model generates without length options. So without
    // length options, the text would end at its first token.
    let stop = [free[0], free[2]];
    for device in devices() {
        let gemma = fixture.load(&device.device, DType::F32);
        let options = GenerateOptions {
            ignore_stop_tokens: false,
            stop_tokens: stop.to_vec(),
            ..greedy(&gemma, COUNT)
        };
        let check = |what: &str, options: GenerateOptions, expected: &[u32]| {
            let what = format!("{what} {}", device.name);
            assert_eq!(generate(&gemma, prompt, &options), expected, "{what}");
            let drafted = GenerateOptions {
                drafts: Drafts::Lookup,
                ..options.clone()
            };
            assert_eq!(
                generate(&gemma, prompt, &drafted),
                expected,
                "{what} drafted"
            );
            let batch = [
                Prompt::Tokens(prompt.to_vec()),
                Prompt::Tokens(prompt[1..].to_vec()),
            ];
            let batch = gemma
                .generate_batch(&batch, &options)
                .expect("the generations succeed");
            assert_eq!(batch[0].tokens, expected, "{what} in a batch");
        };
        check("nothing", options.clone(), &free[..1]);
        for fewest in [1, 3, COUNT] {
            let least = |at, token| at >= fewest || !stop.contains(&token);
            let expected = expected(&reference, prompt, &stop, least);
            assert!(expected.len() > fewest.min(COUNT - 1), "{expected:?}");
            let new = GenerateOptions {
                min_new_tokens: Some(fewest),
                // `min_length` has no effect if `min_new_tokens` is also set.
                min_length: Some(prompt.len() + COUNT),
                ..options.clone()
            };
            check("min_new_tokens", new, &expected);
            let length = GenerateOptions {
                min_length: Some(prompt.len() + fewest),
                ..options.clone()
            };
            check("min_length", length, &expected);
        }
        let short = GenerateOptions {
            min_length: Some(prompt.len()),
            ..options.clone()
        };
        check("a min_length that the prompt has", short, &free[..1]);
        let begin = |at, token| at > 0 || token != free[0];
        let begin = expected(&reference, prompt, &stop, begin);
        assert_ne!(begin[0], free[0]);
        let first = GenerateOptions {
            begin_suppress_tokens: vec![free[0]],
            ..options.clone()
        };
        check("begin_suppress_tokens", first, &begin);
    }
}

/// `min_new_tokens` suppresses stop tokens only at the beginning of a sampled text. The host samples these first
/// tokens, and the device samples all later tokens.
#[test]
fn length_options_with_sampling_apply_only_at_the_beginning() {
    let fixture = Fixture::open("dense-ple");
    for device in devices() {
        let gemma = fixture.load(&device.device, DType::F32);
        let vocabulary = 0..gemma.config().vocab_size as u32;
        let few = 40..44;
        let others: Vec<u32> = vocabulary.filter(|token| !few.contains(token)).collect();
        let mut left = false;
        for seed in 0..4 {
            let options = GenerateOptions {
                sampling: Sampling {
                    temperature: 3.0,
                    seed: Some(seed),
                    ..Sampling::greedy()
                },
                stop_tokens: others.clone(),
                min_new_tokens: Some(3),
                ..greedy(&gemma, 12)
            };
            let drawn = generate(&gemma, &fixture.prompt, &options);
            assert_eq!(drawn.len(), 12, "{}", device.name);
            assert!(
                drawn[..3].iter().all(|token| few.contains(token)),
                "{drawn:?}"
            );
            left |= drawn[3..].iter().any(|token| !few.contains(token));
            assert_eq!(
                generate(&gemma, &fixture.prompt, &options),
                drawn,
                "{}",
                device.name
            );
        }
        assert!(left, "{}: tokens stay suppressed", device.name);
    }
}

#[test]
fn max_length_counts_the_prompt() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let prompt = &fixture.prompt[..];
    let of_length = |length, max_tokens| {
        let options = GenerateOptions {
            max_length: Some(length),
            ..greedy(&gemma, max_tokens)
        };
        gemma.generate(prompt.to_vec(), &options, |_| ControlFlow::Continue(()))
    };
    for (length, max_tokens, count) in [
        (prompt.len() + 3, 8, 3),
        (prompt.len() + 9, 8, 8),
        (prompt.len() + 1, 8, 1),
    ] {
        let generation = of_length(length, max_tokens).expect("the generation succeeds");
        assert_eq!(generation.tokens, fixture.generated[..count]);
        assert_eq!(generation.finish_reason, FinishReason::Length);
    }
    for length in [1, prompt.len()] {
        let error = of_length(length, 8)
            .expect_err("the prompt fills max_length")
            .to_string();
        assert!(
            error.contains(&format!("max_length is {length}")),
            "{error}"
        );
    }
}

/// The file `generation_config.json` sets the length options. If the file has both `max_new_tokens` and `max_length`,
/// `max_new_tokens` applies. A bad word that is a single token is never chosen.
#[test]
fn length_options_are_read_from_generation_config() {
    let folder = crate::programs::folder::Folder::copy("dense-ple");
    let load =
        || Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new()).expect("model loads");
    let fixture = Fixture::open("dense-ple");
    let plain = load();
    assert_eq!(plain.options().max_length, None);
    assert_eq!(plain.warnings().count(), 0);
    let free = generate(&plain, &fixture.prompt, &greedy(&plain, 4));
    let set =
        |field: &str, value: serde_json::Value| folder.set("generation_config.json", field, value);
    set("max_length", 40.into());
    set("min_new_tokens", 2.into());
    set("min_length", 3.into());
    set("begin_suppress_tokens", vec![7].into());
    set("bad_words_ids", vec![vec![free[0]], vec![5, 6]].into());
    set("typical_p", 0.2.into());
    let gemma = load();
    let options = gemma.options();
    assert_eq!((options.max_tokens, options.max_length), (512, Some(40)));
    assert_eq!(
        (options.min_new_tokens, options.min_length),
        (Some(2), Some(3))
    );
    assert_eq!(options.begin_suppress_tokens, [7]);
    let allowed = |_, token| token != free[0];
    let expected = expected(&plain, &fixture.prompt, &[], allowed);
    let options = GenerateOptions {
        max_tokens: COUNT,
        sampling: Sampling {
            suppress_tokens: options.sampling.suppress_tokens,
            ..Sampling::greedy()
        },
        ..greedy(&plain, COUNT)
    };
    assert_eq!(generate(&gemma, &fixture.prompt, &options), expected);
    let warnings: Vec<&str> = gemma.warnings().collect();
    let [typical, words] = warnings[..] else {
        panic!("{warnings:?}");
    };
    assert!(typical.contains("typical_p is 0.2"), "{typical}");
    assert!(words.contains("bad_words_ids is [[5,6]]"), "{words}");
    set("max_new_tokens", 9.into());
    let options = load().options();
    assert_eq!((options.max_tokens, options.max_length), (9, None));
}
