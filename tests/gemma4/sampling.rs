//! Tests the effect of sampling options on logits: penalties, suppressed tokens, and cuts (top-k, top-p, min-p). Other
//! tests cover the seeds of the sequences in a batch, and the reported log probabilities.

use crate::fixture::{Fixture, greedy, on_every_device, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Gemma4, GenerateOptions, Generation, GenerationDefaults, Prompt, Sampler, Sampling,
};
use std::ops::ControlFlow;

fn generate(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Generation {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
}

/// Returns the model's logits after the last token of `read`.
fn logits(gemma: &Gemma4, read: &[u32]) -> Vec<f32> {
    let logits = values(
        gemma
            .model()
            .forward(tokens(&[read], &gemma.device()))
            .expect("the tokens are in the vocabulary"),
    );
    logits[logits.len() - gemma.config().vocab_size..].to_vec()
}

fn largest(logits: &[f32]) -> u32 {
    let numbered = (0u32..).zip(logits);
    let largest = numbered.reduce(|best, next| if next.1 > best.1 { next } else { best });
    largest.expect("the row is not empty").0
}

/// Applies the logits processors of Hugging Face Transformers in f32. The repetition penalty comes first, and applies
/// to all tokens of the prompt and of the generated text. The suppression of tokens comes second.
fn processed(mut logits: Vec<f32>, read: &[u32], sampling: &Sampling) -> Vec<f32> {
    for (token, logit) in (0u32..).zip(&mut logits) {
        if read.contains(&token) {
            *logit = match *logit < 0.0 {
                true => *logit * sampling.repetition_penalty,
                false => *logit / sampling.repetition_penalty,
            };
        }
        if sampling.suppress_tokens.contains(&token) {
            *logit = f32::NEG_INFINITY;
        }
    }
    logits
}

#[test]
fn sampling_greedy_obeys_penalty_and_suppressed_tokens() {
    on_every_device(|fixture, gemma, device| {
        let first = fixture.generated[0];
        for (repetition_penalty, suppress_tokens) in [
            (1.0, vec![first]),
            (1.5, vec![]),
            (0.5, vec![first, 320_000]),
        ] {
            let sampling = Sampling {
                repetition_penalty,
                suppress_tokens,
                ..Sampling::greedy()
            };
            let options = GenerateOptions {
                sampling: sampling.clone(),
                ..greedy(gemma, 5)
            };
            let found = generate(gemma, &fixture.prompt, &options).tokens;
            let mut read = fixture.prompt.clone();
            for token in &found {
                let expected = largest(&processed(logits(gemma, &read), &read, &sampling));
                assert_eq!(
                    *token, expected,
                    "{} {} {sampling:?}: {found:?}",
                    fixture.name, device.name
                );
                read.push(*token);
            }
        }
    });
}

#[test]
fn sampling_with_every_token_suppressed_is_an_error() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let options = GenerateOptions {
        sampling: Sampling {
            suppress_tokens: (0..320).collect(),
            ..Sampling::greedy()
        },
        ..greedy(&gemma, 5)
    };
    let error = gemma
        .generate(fixture.prompt, &options, |_| ControlFlow::Continue(()))
        .expect_err("every token is suppressed");
    assert!(error.to_string().contains("logits"), "{error}");
}

/// Returns the frequency of each token over many draws.
fn frequencies(sampling: &Sampling, read: &[u32], logits: &[f32]) -> Vec<f64> {
    const DRAWS: u64 = 20_000;
    let mut counts = vec![0.0; logits.len()];
    for seed in 0..DRAWS {
        let mut sampler = Sampler::new(&Sampling {
            seed: Some(seed),
            ..sampling.clone()
        });
        sampler.read(read);
        counts[sampler.sample(logits).expect("there is a token") as usize] += 1.0 / DRAWS as f64;
    }
    counts
}

#[track_caller]
fn assert_frequencies(sampling: &Sampling, read: &[u32], logits: &[f32], expected: &[f64]) {
    let found = frequencies(sampling, read, logits);
    for (found_one, expected_one) in found.iter().zip(expected) {
        let close = (found_one - expected_one).abs() < 0.02;
        let never = *expected_one > 0.0 || *found_one == 0.0;
        assert!(close && never, "{found:?} is not {expected:?}");
    }
}

/// Returns options that draw from all tokens at temperature 1.
fn drawing() -> Sampling {
    Sampling {
        temperature: 1.0,
        ..Sampling::greedy()
    }
}

#[test]
fn sampling_min_p_applies_after_temperature() {
    let logits = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
    let min_p = |min_p, temperature| Sampling {
        min_p: Some(min_p),
        temperature,
        ..drawing()
    };
    assert_frequencies(&min_p(0.0, 1.0), &[], &logits, &[0.1, 0.4, 0.2, 0.3]);
    let ninths = [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0];
    assert_frequencies(&min_p(0.4, 1.0), &[], &logits, &ninths);
    // The largest probability is 0.4. At temperature 0.5 the probabilities are squared and then normalized. The token
    // with the probability 0.2 then has a quarter of the largest probability instead of a half. A min-p of 0.4
    // therefore removes this token.
    assert_frequencies(
        &min_p(0.4, 0.5),
        &[],
        &logits,
        &[0.0, 16.0 / 25.0, 0.0, 9.0 / 25.0],
    );
    assert_frequencies(&min_p(1.0, 1.0), &[], &logits, &[0.0, 1.0, 0.0, 0.0]);
}

#[test]
fn sampling_penalty_applies_before_temperature() {
    let logits = [2.0f32, -2.0, 1.0, 0.0];
    let sampling = Sampling {
        repetition_penalty: 2.0,
        suppress_tokens: vec![3],
        temperature: 0.5,
        ..drawing()
    };
    // The penalty of 2 changes the logit 2 to 2 / 2 and the logit -2 to -2 · 2. The temperature of 0.5 then doubles all
    // logits. The penalty applies to a token only once, even if the token was read several times.
    let weights = [2.0f64, -8.0, 2.0].map(f64::exp);
    let sum: f64 = weights.iter().sum();
    let expected = [weights[0] / sum, weights[1] / sum, weights[2] / sum, 0.0];
    assert_frequencies(&sampling, &[0, 1, 1, 0, 9], &logits, &expected);
}

#[test]
fn sampling_drawn_tokens_are_penalized() {
    let sampling = Sampling {
        repetition_penalty: 10.0,
        ..Sampling::greedy()
    };
    let mut sampler = Sampler::new(&sampling);
    let drawn: Vec<u32> = (0..4)
        .map(|_| sampler.sample(&[3.0, 2.9, 2.8, 0.0]).expect("a token"))
        .collect();
    assert_eq!(drawn, [0, 1, 2, 0]);
}

#[test]
fn sampling_option_out_of_range_is_refused() {
    for (wrong, argument) in [
        (
            Sampling {
                min_p: Some(-0.1),
                ..drawing()
            },
            "min_p",
        ),
        (
            Sampling {
                min_p: Some(1.1),
                ..drawing()
            },
            "min_p",
        ),
        (
            Sampling {
                min_p: Some(f32::NAN),
                ..drawing()
            },
            "min_p",
        ),
        (
            Sampling {
                repetition_penalty: 0.0,
                ..drawing()
            },
            "repetition_penalty",
        ),
        (
            Sampling {
                repetition_penalty: -1.0,
                ..drawing()
            },
            "repetition_penalty",
        ),
        (
            Sampling {
                repetition_penalty: f32::NAN,
                ..drawing()
            },
            "repetition_penalty",
        ),
        (
            Sampling {
                repetition_penalty: f32::INFINITY,
                ..drawing()
            },
            "repetition_penalty",
        ),
    ] {
        let error = wrong
            .validate()
            .expect_err("the input is refused")
            .to_string();
        assert!(error.starts_with(argument), "{error}");
    }
}

/// Equal prompts of a batch get different answers, because each sequence of the batch has a seed of its own. If the
/// prompt is generated alone with one of these seeds, the answer is the same as in the batch.
#[test]
fn sampling_sequences_of_a_batch_have_their_own_seeds() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let options = |seed| GenerateOptions {
        sampling: Sampling {
            temperature: 3.0,
            seed: Some(seed),
            ..Sampling::greedy()
        },
        ..greedy(&gemma, 8)
    };
    let batch: Vec<Prompt> = vec![fixture.prompt.clone().into(); 3];
    let generations = gemma
        .generate_batch(&batch, &options(7))
        .expect("the generations succeed");
    for (index, generation) in (0u64..).zip(&generations) {
        let alone = generate(&gemma, &fixture.prompt, &options(7 + index));
        assert_eq!(generation.tokens, alone.tokens, "sequence {index}");
    }
    assert_ne!(generations[0].tokens, generations[1].tokens);
    assert_ne!(generations[1].tokens, generations[2].tokens);
    assert_ne!(generations[0].tokens, generations[2].tokens);
    // The sequences of a batch have consecutive seeds. After the largest possible seed, the next seed is 0.
    assert!(gemma.generate_batch(&batch, &options(u64::MAX)).is_ok());
}

/// The reported log probabilities are computed from the model's logits before any sampling option applies.
#[test]
fn logprobs_are_those_of_the_model() {
    on_every_device(|fixture, gemma, device| {
        let what = format!("{} {}", fixture.name, device.name);
        for sampling in [
            Sampling::greedy(),
            Sampling {
                temperature: 2.0,
                repetition_penalty: 1.3,
                suppress_tokens: vec![fixture.generated[0]],
                top_k: Some(50),
                seed: Some(3),
                ..Sampling::greedy()
            },
        ] {
            let options = GenerateOptions {
                logprobs: Some(3),
                sampling,
                ..greedy(gemma, 4)
            };
            let generation = generate(gemma, &fixture.prompt, &options);
            assert_eq!(generation.logprobs.len(), 4, "{what}");
            let mut read = fixture.prompt.clone();
            for (token, found) in generation.tokens.iter().zip(&generation.logprobs) {
                let logits = logits(gemma, &read);
                let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
                let expected = |token: u32| f64::from(logits[token as usize]) - sum.ln();
                let close = |token, logprob| (expected(token) - f64::from(logprob)).abs() < 5e-3;
                assert!(close(*token, found.logprob), "{what}: {found:?}");
                assert_eq!(found.top.len(), 3, "{what}");
                assert_eq!(found.top[0].0, largest(&logits), "{what}");
                for (token, logprob) in &found.top {
                    assert!(close(*token, *logprob), "{what}: {found:?}");
                }
                assert!(
                    found.top.is_sorted_by(|a, b| a.1 >= b.1),
                    "{what}: {found:?}"
                );
                read.push(*token);
            }
        }
    });
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let options = greedy(&gemma, 2);
    assert!(
        generate(&gemma, &fixture.prompt, &options)
            .logprobs
            .is_empty()
    );
    let options = GenerateOptions {
        logprobs: Some(0),
        ..options
    };
    let generation = generate(&gemma, &fixture.prompt, &options);
    assert!(generation.logprobs.iter().all(|token| token.top.is_empty()));
    assert_eq!(generation.tokens, fixture.generated[..2]);
}

#[test]
fn sampling_defaults_are_read_from_generation_config() {
    let defaults = |json: &str| GenerationDefaults::from_json(json);
    let read = defaults(
        r#"{"do_sample": true, "min_p": 0.05, "repetition_penalty": 1.1, "suppress_tokens": [3, 4],
            "stop_strings": ["\n\n", "END"]}"#,
    )
    .expect("the defaults are valid");
    assert_eq!(read.stop_strings, ["\n\n", "END"]);
    let sampling = read.sampling();
    assert_eq!(sampling.min_p, Some(0.05));
    assert_eq!(sampling.repetition_penalty, 1.1);
    assert_eq!(sampling.suppress_tokens, [3, 4]);

    // The repetition penalty, suppressed tokens and stop strings also apply to greedy decoding.
    let read =
        defaults(r#"{"repetition_penalty": 1.1, "suppress_tokens": [3], "stop_strings": "END"}"#);
    let read = read.expect("the defaults are valid");
    assert_eq!(read.stop_strings, ["END"]);
    assert!(read.sampling().is_greedy());
    assert_eq!(read.sampling().repetition_penalty, 1.1);
    assert_eq!(read.sampling().suppress_tokens, [3]);

    let nothing = r#"{"min_p": null, "repetition_penalty": null, "suppress_tokens": null, "stop_strings": null}"#;
    assert_eq!(
        defaults(nothing).expect("the defaults are valid"),
        GenerationDefaults::default()
    );
    for (json, word) in [
        (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
        (r#"{"do_sample": true, "min_p": 2}"#, "min_p"),
        (r#"{"suppress_tokens": 3}"#, "invalid type"),
        (r#"{"stop_strings": 3}"#, "stop_strings"),
        (r#"{"stop_strings": [""]}"#, "stop_strings"),
    ] {
        let error = defaults(json).expect_err(json).to_string();
        assert!(
            error.starts_with("generation_config.json: ") && error.contains(word),
            "{json}: {error}"
        );
    }
}
