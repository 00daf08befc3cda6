//! Tests drafters, the small models that compute draft tokens. The draft tokens and hidden states equal the results of
//! Hugging Face Transformers on the same tiny checkpoints. A text generated with a drafter equals the text without it.
//! A drafter that does not fit the model is refused, and the error names the difference.

mod refused;

use crate::devices::devices;
use crate::fixture::{Fixture, Reference, folder, greedy, read, tokens, values};
use crate::programs::folder::{Folder, WRITING};
use burn::tensor::{DType, Device, Tensor};
use burn_gemma4::{
    Drafter, Drafts, FinishReason, Gemma4, Gemma4Error, GenerateOptions, Generation, LoadOptions,
    Logits, Sampling,
};
use std::{collections::HashMap, ops::ControlFlow};

/// The drafters with their target models. The first drafter computes logits only for the tokens of a few groups, and the
/// second drafter computes the logits of all tokens.
const PAIRS: [(&str, &str); 2] = [
    ("assistant-ple", "dense-ple"),
    ("assistant-keqv", "dense-keqv"),
];

fn load(drafter: &str, target: &'static str, device: &Device) -> Gemma4 {
    Fixture::open(target)
        .load(device, DType::F32)
        .with_drafter(folder(drafter))
        .unwrap_or_else(|error| panic!("{drafter}: {error}"))
}

fn reference(drafter: &str) -> HashMap<String, Reference> {
    read(folder(drafter).join("reference.safetensors"))
}

fn whole(numbers: &Reference) -> Vec<u32> {
    numbers.values.iter().map(|number| *number as u32).collect()
}

/// A drafter gives the same draft tokens and hidden states as Hugging Face Transformers. The expected results were
/// computed with `strict_window`, that is, with the exact window. In Transformers itself, the drafter's window has one
/// key more.
#[test]
fn drafter_tokens_and_hidden_states_equal_transformers() {
    for device in devices() {
        for (name, target) in PAIRS {
            let gemma = load(name, target, &device.device);
            let (model, reference) = (gemma.model(), reference(name));
            let prompt = whole(&reference["input_ids"]);
            let (last, before) = prompt.split_last().expect("the prompt is valid");
            for compact in [false, gemma.config().attention_k_eq_v] {
                for spare in [0, 8] {
                    let what = format!("{name} {} compact {compact} spare {spare}", device.name);
                    let cache = match compact {
                        true => model.compact_cache(vec![0]),
                        false => model.cache(vec![0]),
                    };
                    let mut cache = cache.forgetting(spare);
                    let before = tokens(&[before], &device.device);
                    model
                        .step(before, &mut cache, Logits::None)
                        .expect("the step succeeds");
                    let mut decoder = model.decoder(&mut cache);
                    if spare > 0 {
                        // The decoder processes four tokens and then removes them from the cache. The next step must not
                        // depend on the removed tokens.
                        decoder
                            .read(&[*last, 50, 60, 70])
                            .expect("the pass succeeds");
                        decoder.forget(4).expect("the cache can forget the columns");
                    }
                    let next = decoder.step(&[*last]).expect("the step succeeds");
                    let hidden = next.hidden().expect("the hidden state is available");
                    reference["target.last_hidden"].assert_close(hidden.clone(), &what);
                    let token = next.argmax().expect("there is a token")[0];
                    assert_eq!(whole(&reference["target.next_token"]), [token], "{what}");
                    let drafter = gemma.drafter().expect("the drafter is loaded");
                    let guesses = drafter.draft(model, decoder.cache(), token, hidden, 4);
                    let guesses = guesses.expect("the draft succeeds");
                    let expected = whole(&reference["strict_window.draft_tokens"]);
                    assert_eq!(
                        guesses.tokens().expect("the draft tokens are readable"),
                        expected,
                        "{what}"
                    );
                    reference["strict_window.projected_hidden"]
                        .assert_close(guesses.hidden(), &what);
                }
            }
        }
    }
}

/// If a captured CUDA graph computes the draft tokens, they equal the draft tokens from separate kernel launches. One
/// case runs with eight spare cache slots for rejected tokens, and the other case has no spare slots.
#[test]
fn drafter_replayed_round_equals_direct_round() {
    for device in devices() {
        for (name, target) in PAIRS {
            let gemma = load(name, target, &device.device);
            for (spare, compact) in [(0, false), (8, gemma.config().attention_k_eq_v)] {
                let what = format!("{name} {} spare {spare}", device.name);
                replay(&gemma, &Fixture::open(target), spare, compact, &what);
            }
        }
    }
}

fn replay(gemma: &Gemma4, fixture: &Fixture, spare: usize, compact: bool, what: &str) {
    let (model, drafter) = (
        gemma.model(),
        gemma.drafter().expect("the drafter is loaded"),
    );
    let cache = match compact {
        true => model.compact_cache(vec![0]),
        false => model.cache(vec![0]),
    };
    let mut cache = cache.forgetting(spare);
    let first = tokens(&[&fixture.prompt[..3]], &gemma.device());
    model
        .step(first, &mut cache, Logits::None)
        .expect("the step succeeds");
    let mut decoder = model
        .decoder(&mut cache)
        .with_drafter(drafter)
        .expect("the drafter fits the model");
    let text = [&fixture.prompt[3..], &fixture.generated].concat();
    for (index, token) in text.iter().enumerate() {
        let what = format!("{what} at {index}");
        let wrong = spare.min(index % 4);
        let read = [&[*token][..], &vec![50; wrong]].concat();
        let next = decoder.read(&read).expect("the pass succeeds");
        let hidden = next
            .hidden()
            .expect("the hidden state is available")
            .narrow(0, 0, 1);
        decoder
            .forget(wrong)
            .expect("the cache can forget the columns");
        let count = 1 + index % 2;
        let expected = drafter.draft(model, decoder.cache(), 60, hidden.clone(), count);
        let expected = expected.expect("the draft succeeds");
        let of_tokens = expected.tokens().expect("the draft tokens are readable");
        let of_streams = Reference {
            values: values(expected.hidden()),
        };
        let found = decoder
            .guess(60, hidden, count)
            .expect("the draft succeeds");
        assert_eq!(
            found.tokens().expect("the draft tokens are readable"),
            of_tokens,
            "{what}"
        );
        of_streams.assert_close(found.hidden(), &what);
    }
}

/// The model verifies draft tokens in two ways with the same results. In the first way, the draft tokens stay in device
/// memory. In the second way, the host reads the draft tokens and gives them to the model.
///
/// After each forward pass, the test itself chooses the row that counts as the last accepted token. Both decoders continue
/// from the hidden state of that row.
#[test]
fn drafter_tokens_on_device_equal_those_from_the_host() {
    for device in devices() {
        for (name, target) in PAIRS {
            let gemma = load(name, target, &device.device);
            let fixture = Fixture::open(target);
            let (model, drafter) = (
                gemma.model(),
                gemma.drafter().expect("the drafter is loaded"),
            );
            let first = || {
                let mut cache = model.cache(vec![0]).forgetting(3);
                let first = tokens(&[&fixture.prompt[..2]], &gemma.device());
                model
                    .step(first, &mut cache, Logits::None)
                    .expect("the step succeeds");
                cache
            };
            let mut caches = [first(), first()];
            let mut decoders = caches.each_mut().map(|cache| {
                let decoder = model.decoder(cache);
                decoder
                    .with_drafter(drafter)
                    .expect("the drafter fits the model")
            });
            let [on_device, on_host] = &mut decoders;
            let token = fixture.prompt[2];
            let begun = [&mut *on_device, on_host].map(|decoder| {
                let next = decoder.step(&[token]).expect("the step succeeds");
                next.hidden().expect("the hidden state is available")
            });
            let [mut streams, mut alone] = begun;
            let mut row = 0;
            let text = [&fixture.prompt[3..], &fixture.generated].concat();
            for (index, token) in text.into_iter().take(14).enumerate() {
                let what = format!("{name} {} at {index}", device.name);
                let count = 1 + index % 3;
                let read = on_device.guess_and_read(token, streams, row, count);
                let (guesses, next) = read.expect("the pass succeeds");
                streams = next.hidden().expect("the hidden states are available");
                let found = next.argmax().expect("the tokens are valid");
                let found_guesses = guesses.tokens().expect("the draft succeeds");

                let guesses = on_host
                    .guess(token, alone, count)
                    .expect("the draft succeeds");
                let guesses = guesses.tokens().expect("the draft tokens are readable");
                assert_eq!(found_guesses, guesses, "{what}");
                let read = on_host.read(&[&[token], &guesses[..]].concat());
                let next = read.expect("the pass succeeds");
                let expected = Reference {
                    values: values(next.hidden().expect("the hidden states are available")),
                };
                expected.assert_close(streams.clone(), &what);
                row = index % (1 + count);
                alone = next
                    .hidden()
                    .expect("the hidden states are available")
                    .narrow(0, row, 1);
                assert_eq!(
                    found,
                    next.argmax().expect("the tokens are valid"),
                    "{what}"
                );
                for decoder in [&mut *on_device, on_host] {
                    decoder
                        .forget(count - row)
                        .expect("the cache can forget the columns");
                }
            }
            let refused = on_device.guess_and_read(50, streams, 9, 1);
            assert!(matches!(
                refused,
                Err(Gemma4Error::Argument {
                    argument: "row",
                    ..
                })
            ));
        }
    }
}

fn generate(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Generation {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
}

/// If the drafter of a decoder is replaced, the decoder's next draft tokens come from the new drafter.
#[test]
fn decoder_with_replaced_drafter_uses_the_new_one() {
    let folder = Folder::drafter("assistant-ple");
    folder.edit(|tensors| {
        let projection = tensors
            .get_mut("post_projection.weight")
            .expect("the drafter has this tensor");
        projection.bytes.fill(0);
    });
    for device in devices() {
        let gemma = load("assistant-ple", "dense-ple", &device.device);
        let (model, first) = (
            gemma.model(),
            gemma.drafter().expect("the drafter is loaded"),
        );
        let options = LoadOptions::new().dtype(DType::F32);
        let second =
            Drafter::load(folder.path(), &device.device, options).expect("the drafter is valid");
        let mut cache = model.cache(vec![0]);
        let before = tokens(&[&[2, 50, 60]], &device.device);
        model
            .step(before, &mut cache, Logits::None)
            .expect("the step succeeds");
        let mut decoder = model.decoder(&mut cache);
        for (drafter, is_zero) in [(first, false), (&second, true), (first, false)] {
            decoder = decoder
                .with_drafter(drafter)
                .expect("the drafter fits the model");
            let hidden = Tensor::ones([1, 64], &device.device);
            let guesses = decoder.guess(70, hidden, 2).expect("the draft succeeds");
            let streams = values(guesses.hidden());
            let found = streams.iter().all(|value| *value == 0.0);
            assert_eq!(found, is_zero, "{}", device.name);
        }
    }
}

/// With a drafter, a GGUF model generates the same text as without a drafter.
#[test]
fn drafter_of_gguf_model_leaves_the_text_unchanged() {
    let device = Device::flex();
    let gguf = folder("gguf").join("dense-ple.Q8_0.gguf");
    let options = LoadOptions::new().dtype(DType::F32);
    let gemma = Gemma4::load(gguf, &device, options).expect("the model is valid");
    let gemma = gemma
        .with_drafter(folder("assistant-ple"))
        .expect("the drafter fits the model");
    let plain = greedy(&gemma, 16);
    let expected = generate(&gemma, &[2, 50, 60], &plain);
    let options = GenerateOptions {
        drafts: Drafts::Drafter,
        ..plain
    };
    assert_eq!(
        generate(&gemma, &[2, 50, 60], &options).tokens,
        expected.tokens
    );
}

/// A drafter changes neither a greedy nor a sampled text. The drafters of this test have random weights, so the model rejects
/// nearly all draft tokens.
#[test]
fn drafter_of_random_weights_leaves_the_text_unchanged() {
    for device in devices() {
        for (name, target) in PAIRS {
            let gemma = load(name, target, &device.device);
            let fixture = Fixture::open(target);
            let mut drawn = greedy(&gemma, 16);
            drawn.sampling = Sampling {
                temperature: 1.0,
                top_k: Some(3),
                repetition_penalty: 0.7,
                seed: Some(5),
                ..Sampling::greedy()
            };
            for options in [greedy(&gemma, 16), drawn] {
                let expected = generate(&gemma, &fixture.prompt, &options);
                for draft_tokens in [None, Some(1), Some(4)] {
                    let options = GenerateOptions {
                        drafts: Drafts::Drafter,
                        draft_tokens,
                        compact_keys: draft_tokens.is_none(),
                        ..options.clone()
                    };
                    let found = generate(&gemma, &fixture.prompt, &options);
                    let what = format!("{name} {} {draft_tokens:?}", device.name);
                    assert_eq!(found.tokens, expected.tokens, "{what}");
                    assert!(found.drafts.drafted > 0, "{what}");
                }
            }
        }
    }
}

/// If a drafter is built to predict the model's text, the model accepts all draft tokens of the drafter. The text also
/// ends correctly between two draft tokens of one forward pass.
#[test]
fn drafter_with_right_tokens_accepts_all() {
    for device in devices() {
        let target = Folder::that_writes(&WRITING);
        let gemma =
            Gemma4::from_pretrained(target.path(), &device.device).expect("the model is valid");
        let gemma = gemma.with_drafter(target.drafter_of_chain().path());
        let gemma = gemma.expect("the drafter is valid");
        let options = GenerateOptions {
            drafts: Drafts::Drafter,
            draft_tokens: Some(4),
            ..greedy(&gemma, 16)
        };
        let found = generate(&gemma, &WRITING[..1], &options);
        assert_eq!(found.tokens, WRITING[1..17], "{}", device.name);
        // The prefill gives the first of the 16 tokens, and three forward passes give five tokens each.
        assert_eq!(found.drafts.passes, 3, "{:?}", found.drafts);
        assert_eq!(found.drafts.acceptance(), 1.0, "{:?}", found.drafts);
        assert_eq!(found.drafts.tokens_per_pass(), 5.0);
        for end in 1..17 {
            let options = GenerateOptions {
                stop_tokens: vec![WRITING[end]],
                ignore_stop_tokens: false,
                ..options.clone()
            };
            let mut session = gemma.session();
            let found = session.generate(WRITING[..1].to_vec(), &options, |_| {
                ControlFlow::Continue(())
            });
            let found = found.expect("the generation succeeds");
            assert_eq!(found.tokens, WRITING[1..=end], "{} {end}", device.name);
            assert_eq!(found.finish_reason, FinishReason::Stop);
            assert_eq!(session.len(), end);
        }
        // If all draft tokens are accepted, the adaptive number of draft tokens per forward pass grows.
        let options = GenerateOptions {
            draft_tokens: None,
            ..options
        };
        let found = generate(&gemma, &WRITING[..1], &options);
        assert!(found.drafts.passes <= 3, "{:?}", found.drafts);
    }
}

/// A session generates a text with draft tokens, and then continues the text with a longer prompt. The second answer is
/// the same as without draft tokens.
#[test]
fn drafter_session_continues_as_without_drafts() {
    let gemma = load("assistant-ple", "dense-ple", &Device::flex());
    let fixture = Fixture::open("dense-ple");
    let plain = greedy(&gemma, 7);
    let options = GenerateOptions {
        drafts: Drafts::Drafter,
        ..plain.clone()
    };
    let mut session = gemma.session();
    let mut answer = |prompt: &[u32]| {
        session
            .generate(prompt.to_vec(), &options, |_| ControlFlow::Continue(()))
            .expect("the generation succeeds")
    };
    let first = answer(&fixture.prompt);
    let longer = [&fixture.prompt[..], &first.tokens, &[77, 78]].concat();
    let second = answer(&longer);
    assert_eq!(second.timings.prefill_tokens, 3);
    assert_eq!(second.tokens, generate(&gemma, &longer, &plain).tokens);
}

#[test]
fn drafter_missing_or_not_requested_is_not_used() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let options = GenerateOptions {
        drafts: Drafts::Drafter,
        ..greedy(&gemma, 4)
    };
    match gemma.generate(vec![2, 50], &options, |_| ControlFlow::Continue(())) {
        Err(error @ Gemma4Error::Argument { .. }) => {
            assert!(
                error.to_string().starts_with("drafts: are a drafter's"),
                "{error}"
            );
        }
        other => panic!("{other:?}"),
    }
    let gemma = load("assistant-ple", "dense-ple", &Device::flex());
    let found = generate(&gemma, &[2, 50], &greedy(&gemma, 4));
    assert_eq!(found.drafts.passes, 0);
}
