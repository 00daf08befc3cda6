//! Tests speculative decoding: the generated text equals the text without draft tokens. A draft token is a guess of a next
//! token, which the model's next forward pass accepts or rejects.

use crate::fixture::{Fixture, greedy, on_every_device, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    DraftCounts, Drafts, FinishReason, Gemma4, Gemma4Error, GenerateOptions, Generation, Logits,
    Prompt, Sampling,
};
use std::ops::ControlFlow;

/// The numbers of draft tokens per forward pass that the tests use. `None` lets the decoder adapt the number.
const PACES: [Option<usize>; 4] = [None, Some(1), Some(3), Some(8)];

fn generate(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Generation {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
}

fn drafted(options: &GenerateOptions, draft_tokens: Option<usize>) -> GenerateOptions {
    GenerateOptions {
        drafts: Drafts::Lookup,
        draft_tokens,
        ..options.clone()
    }
}

/// Returns four parts, one after the other: the fixture's prompt, its answer, the prompt again, and the first eight
/// tokens of the answer. Prompt lookup can take draft tokens from the first answer.
pub fn repeated(fixture: &Fixture) -> Vec<u32> {
    [
        &fixture.prompt[..],
        &fixture.generated,
        &fixture.prompt,
        &fixture.generated[..8],
    ]
    .concat()
}

/// A prompt after which the fixtures' models repeat tokens, so that prompt lookup finds draft tokens.
const REPEATED: [u32; 5] = [2, 50, 60, 50, 60];

#[track_caller]
pub fn assert_same(found: &Generation, expected: &Generation, what: &str) {
    assert_eq!(found.tokens, expected.tokens, "{what}");
    assert_eq!(found.text, expected.text, "{what}");
    assert_eq!(found.logprobs.len(), expected.logprobs.len(), "{what}");
    assert_eq!(found.finish_reason, expected.finish_reason, "{what}");
    let DraftCounts {
        passes,
        drafted,
        accepted,
    } = found.drafts;
    assert!(accepted <= drafted, "{what}: {accepted} of {drafted}");
    assert_eq!(1 + passes + accepted, found.tokens.len(), "{what}");
}

#[test]
fn drafts_greedy_tokens_equal_those_without() {
    on_every_device(|fixture, gemma, device| {
        // On devices that run CubeCL kernels, only some of the draft lengths in `PACES` run. These devices compile and tune
        // new kernels for every number of rows.
        let paces = match device.device == Device::flex() {
            true => &PACES[..],
            false => &[None, Some(8)],
        };
        let options = greedy(gemma, 40);
        let mut accepted = 0;
        for prompt in [repeated(fixture), REPEATED.to_vec()] {
            let expected = generate(gemma, &prompt, &options);
            for pace in paces {
                let what = format!("{} {} {pace:?}", fixture.name, device.name);
                let options = GenerateOptions {
                    compact_keys: *pace == Some(8),
                    ..drafted(&options, *pace)
                };
                let found = generate(gemma, &prompt, &options);
                assert_same(&found, &expected, &what);
                accepted += found.drafts.accepted;
            }
        }
        // The answers repeat earlier text, so the model must accept some draft tokens of prompt lookup.
        assert!(accepted > 0, "{} {}", fixture.name, device.name);
        let found = generate(gemma, &fixture.prompt, &drafted(&options, None));
        assert_eq!(found.tokens[..16], fixture.generated[..16]);
    });
}

/// With the same seed, the decoder samples the same tokens with and without draft tokens, because the random numbers
/// are drawn in the same order. Penalties and some other sampling options depend on the earlier text. For a draft
/// token, the earlier text includes the draft tokens before it.
#[test]
fn drafts_seed_gives_the_tokens_without_drafts() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let prompt = repeated(&fixture);
    let plain = Sampling {
        temperature: 0.7,
        top_k: Some(20),
        top_p: Some(0.9),
        ..Sampling::greedy()
    };
    let mut accepted = 0;
    for sampling in [
        plain.clone(),
        Sampling {
            repetition_penalty: 0.8,
            ..plain.clone()
        },
        Sampling {
            min_p: Some(0.3),
            suppress_tokens: fixture.generated[..2].to_vec(),
            ..plain
        },
        Sampling {
            repetition_penalty: 1.3,
            ..Sampling::greedy()
        },
    ] {
        for seed in 0..6 {
            let options = GenerateOptions {
                sampling: Sampling {
                    seed: Some(seed),
                    ..sampling.clone()
                },
                logprobs: Some(2),
                ..greedy(&gemma, 24)
            };
            let expected = generate(&gemma, &prompt, &options);
            for pace in PACES {
                let found = generate(&gemma, &prompt, &drafted(&options, pace));
                assert_same(&found, &expected, &format!("{sampling:?} {seed} {pace:?}"));
                accepted += found.drafts.accepted;
            }
        }
    }
    assert!(accepted > 0);
}

/// Sampled texts with draft tokens have the model's distribution. Pearson's chi-square test compares the counts of the
/// second and third token of many texts with the model's probabilities. All but five tokens of the vocabulary are
/// suppressed.
#[test]
fn drafts_sampled_tokens_have_the_models_distribution() {
    const TEXTS: usize = 1500;
    const VOCABULARY: [u32; 5] = [70, 90, 120, 200, 310];
    let device = Device::flex();
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&device, DType::F32);
    let temperature = 6.0f32;
    let suppress_tokens: Vec<u32> = (0..gemma.config().vocab_size as u32)
        .filter(|token| !VOCABULARY.contains(token))
        .collect();
    // In the prompt, every token of `VOCABULARY` occurs twice in a row and is followed by other tokens. Prompt lookup
    // therefore probably finds draft tokens for any first token.
    let [a, b, c, d, e] = VOCABULARY;
    let prompt = [a, b, b, a, c, c, a, d, d, a, e, e, a, a, a];

    let probabilities = |text: &[u32]| -> Vec<f64> {
        let row = [&prompt[..], text].concat();
        let mut cache = gemma.model().cache(vec![0]);
        let logits = gemma
            .model()
            .step(tokens(&[&row], &device), &mut cache, Logits::Last(1));
        let logits = values(
            logits
                .expect("the step succeeds")
                .expect("logits were requested"),
        );
        let weights = VOCABULARY.map(|token| f64::from(logits[token as usize] / temperature).exp());
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum).collect()
    };
    let mut expected = vec![0.0; 25];
    for (first, of_first) in VOCABULARY.iter().zip(probabilities(&[])) {
        for (second, of_second) in probabilities(&[*first]).into_iter().enumerate() {
            let text = [*first, VOCABULARY[second]];
            for (third, of_third) in probabilities(&text).into_iter().enumerate() {
                expected[second * 5 + third] += of_first * of_second * of_third;
            }
        }
    }

    let (mut found, mut counts) = (vec![0usize; 25], DraftCounts::default());
    for seed in 0..TEXTS {
        let options = GenerateOptions {
            sampling: Sampling {
                temperature,
                suppress_tokens: suppress_tokens.clone(),
                seed: Some(seed as u64),
                ..Sampling::greedy()
            },
            ..drafted(&greedy(&gemma, 5), Some(3))
        };
        let generation = generate(&gemma, &prompt, &options);
        let place = |token: u32| VOCABULARY.iter().position(|known| *known == token);
        let [_, second, third, ..] = generation.tokens[..] else {
            panic!("{generation:?}");
        };
        let places = place(second)
            .zip(place(third))
            .expect("the tokens are in the vocabulary");
        found[places.0 * 5 + places.1] += 1;
        counts.drafted += generation.drafts.drafted;
        counts.accepted += generation.drafts.accepted;
    }
    assert!(
        counts.drafted > TEXTS && counts.accepted > TEXTS / 2,
        "{counts:?}"
    );
    let (mut square, mut cells) = (0.0, 0);
    for (found, expected) in found.iter().zip(&expected) {
        let expected = expected * TEXTS as f64;
        if expected >= 5.0 {
            square += (*found as f64 - expected).powi(2) / expected;
            cells += 1;
        }
    }
    // A chi-square with 24 degrees of freedom exceeds 52 once in a thousand times. The seeds are fixed, so the test
    // cannot fail by chance.
    assert!(
        cells > 15 && square < 52.0,
        "{square} of {cells}: {found:?}"
    );
}

/// A forward pass may generate several tokens, and the text can end at any of them. The end is caused by a
/// cancellation, a stop token, a stop string, or the maximum number of tokens. Afterwards, the session contains exactly
/// the tokens before the last token of the text.
#[test]
fn drafts_text_ends_between_accepted_tokens() {
    for (name, repetition_penalty) in [("dense-keqv", 0.7), ("moe", 1.0)] {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&Device::flex(), DType::F32);
        let options = GenerateOptions {
            sampling: Sampling {
                repetition_penalty,
                ..Sampling::greedy()
            },
            ..greedy(&gemma, 30)
        };
        let whole = generate(&gemma, &REPEATED, &options);
        let passes = generate(&gemma, &REPEATED, &drafted(&options, Some(5))).drafts;
        assert!(passes.tokens_per_pass() > 2.0, "{name}: {passes:?}");
        for end in 1..=whole.tokens.len() {
            ends(
                &gemma,
                &options,
                end,
                &whole.tokens[..end],
                FinishReason::Cancelled,
            );
            let stop_tokens = vec![whole.tokens[end - 1]];
            let stopping = GenerateOptions {
                stop_tokens: stop_tokens.clone(),
                ignore_stop_tokens: false,
                ..options.clone()
            };
            let first = whole
                .tokens
                .iter()
                .position(|token| stop_tokens.contains(token));
            let stopped = &whole.tokens[..first.map_or(end, |first| first + 1)];
            ends(&gemma, &stopping, usize::MAX, stopped, FinishReason::Stop);
            let name = gemma
                .tokenizer()
                .decode(&stop_tokens, false)
                .expect("the tokens decode");
            let stopping = GenerateOptions {
                stop_strings: vec![name],
                ..options.clone()
            };
            let expected = generate(&gemma, &REPEATED, &stopping);
            ends(
                &gemma,
                &stopping,
                usize::MAX,
                &expected.tokens,
                expected.finish_reason,
            );
            let shortened = GenerateOptions {
                max_tokens: end,
                ..options.clone()
            };
            ends(
                &gemma,
                &shortened,
                usize::MAX,
                &whole.tokens[..end],
                FinishReason::Length,
            );
        }
    }
}

/// Generates a text with draft tokens, and asserts that its tokens are `expected`. The callback stops the generation after
/// `most` tokens.
#[track_caller]
fn ends(
    gemma: &Gemma4,
    options: &GenerateOptions,
    most: usize,
    expected: &[u32],
    reason: FinishReason,
) {
    let options = drafted(options, Some(5));
    let mut session = gemma.session();
    let mut left = most;
    let found = session.generate(REPEATED.to_vec(), &options, |_| {
        left -= 1;
        match left {
            0 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    let found = found.expect("the generation succeeds");
    assert_eq!(found.tokens, expected);
    assert_eq!(found.finish_reason, reason);
    assert_eq!(session.len(), REPEATED.len() + expected.len() - 1);
    // The next text must not depend on the rejected draft tokens.
    let longer = [&REPEATED[..], expected, &[77, 78]].concat();
    let next = session.generate(longer.clone(), &options, |_| ControlFlow::Continue(()));
    let next = next.expect("the generation succeeds");
    assert_eq!(next.timings.prefill_tokens, 3);
    assert_eq!(next.tokens, generate(gemma, &longer, &options).tokens);
}

#[test]
fn drafts_wrong_options_are_refused() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let options = greedy(&gemma, 4);
    let prompt: Prompt = fixture.prompt.clone().into();
    let words = |prompts: usize, options: &GenerateOptions| {
        let error = gemma.generate_batch(&vec![prompt.clone(); prompts], options);
        match error {
            Err(error @ Gemma4Error::Argument { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let looked_up = drafted(&options, None);
    let guessed = GenerateOptions {
        drafts: Drafts::Drafter,
        ..options.clone()
    };
    for prompts in [1, 2] {
        assert!(words(prompts, &guessed).starts_with("drafts: are a drafter's, but none"));
    }
    for count in [0, 9] {
        let wrong = drafted(&options, Some(count));
        assert!(words(1, &wrong).starts_with("draft_tokens: is"));
    }
    let alone = gemma.generate_batch(std::slice::from_ref(&prompt), &looked_up);
    assert_eq!(alone.expect("the generation succeeds").len(), 1);
}
