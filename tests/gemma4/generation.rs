//! Tests that generated tokens equal the tokens of Hugging Face Transformers: for single prompts, with prefill in
//! chunks, in batches and in sessions. Also tests the options for sampling and for the end of a text.

use crate::fixture::{Fixture, greedy, on_every_device};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Drafts, FinishReason, Gemma4, Gemma4Error, GenerateOptions, LoadOptions, Prompt, Sampling,
};
use std::ops::ControlFlow;

fn tokens(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
        .tokens
}

#[test]
fn generate_greedy_tokens_equal_transformers() {
    on_every_device(|fixture, gemma, device| {
        let what = format!("{} {}", fixture.name, device.name);
        let mut options = greedy(gemma, fixture.generated.len());
        assert_eq!(
            tokens(gemma, &fixture.prompt, &options),
            fixture.generated,
            "{what}"
        );
        options.prefill_chunk = Some(5);
        assert_eq!(
            tokens(gemma, &fixture.prompt, &options),
            fixture.generated,
            "{what} in chunks"
        );
        options.compact_keys = true;
        assert_eq!(
            tokens(gemma, &fixture.prompt, &options),
            fixture.generated,
            "{what} in chunks, keys compact"
        );
    });
}

/// The size of the prefill chunks does not change a text. The texts are longer than the window, and longer than the
/// buffers of a full-attention layer at their first allocation.
#[test]
fn generate_prefill_chunks_leave_the_texts_unchanged() {
    for fixture in Fixture::all() {
        let gemma = fixture.load(&Device::flex(), DType::F32);
        let longer: Vec<u32> = (0..11).flat_map(|_| fixture.prompt.clone()).collect();
        let batches = [
            vec![&longer[..], &longer[1..], &fixture.prompt[..1]],
            vec![&longer[..30], &longer[7..37]],
        ];
        let all = |options: &GenerateOptions| {
            let drafted = GenerateOptions {
                drafts: Drafts::Lookup,
                ..options.clone()
            };
            let mut texts = vec![tokens(&gemma, &longer, options)];
            texts.push(tokens(&gemma, &longer, &drafted));
            for batch in &batches {
                let prompts: Vec<Prompt> = batch.iter().map(|one| one.to_vec().into()).collect();
                let batch = gemma.generate_batch(&prompts, options);
                let batch = batch.expect("the generations succeed").into_iter();
                texts.extend(batch.map(|one| one.tokens));
            }
            texts
        };
        let expected = all(&greedy(&gemma, 6));
        for chunk in [9, 257, usize::MAX] {
            let options = GenerateOptions {
                prefill_chunk: Some(chunk),
                ..greedy(&gemma, 6)
            };
            assert_eq!(all(&options), expected, "{} by {chunk}", fixture.name);
        }
    }
}

#[test]
fn generate_batch_equals_single_prompts() {
    on_every_device(|fixture, gemma, device| {
        let options = greedy(gemma, 8);
        let prompts = [
            &fixture.prompt[..],
            &fixture.prompt[9..],
            &fixture.prompt[..1],
        ];
        let batch: Vec<Prompt> = prompts.map(|prompt| prompt.to_vec().into()).into();
        let generations = gemma
            .generate_batch(&batch, &options)
            .expect("the generations succeed");
        let read: usize = prompts.iter().map(|prompt| prompt.len()).sum();
        for (prompt, generation) in prompts.into_iter().zip(generations) {
            let what = format!(
                "{} {} prompt of {}",
                fixture.name,
                device.name,
                prompt.len()
            );
            assert_eq!(generation.prompt_tokens, prompt, "{what}");
            assert_eq!(generation.tokens, tokens(gemma, prompt, &options), "{what}");
            assert_eq!(generation.timings.prefill_tokens, read, "{what}");
        }
    });
}

/// A session prefills only new tokens. If the prompt does not continue the old text, the session prefills the whole prompt
/// again.
#[test]
fn session_reads_only_new_tokens() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let options = greedy(&gemma, 5);
    let mut session = gemma.session();
    let mut generate = |prompt: &[u32]| {
        session
            .generate(prompt.to_vec(), &options, |_| ControlFlow::Continue(()))
            .expect("the generation succeeds")
    };
    let first = generate(&fixture.prompt);
    assert_eq!(first.tokens, fixture.generated[..5]);
    assert_eq!(first.timings.prefill_tokens, 24);
    let longer = [&fixture.prompt[..], &first.tokens, &[77, 78]].concat();
    let second = generate(&longer);
    assert_eq!(
        second.timings.prefill_tokens, 3,
        "the session reads the last generated token and the new ones"
    );
    assert_eq!(second.tokens, tokens(&gemma, &longer, &options));
    let other = generate(&fixture.prompt[1..]);
    assert_eq!(other.timings.prefill_tokens, 23);
    assert_eq!(other.tokens, tokens(&gemma, &fixture.prompt[1..], &options));
    let [first, .., last] = &fixture.prompt[..] else {
        panic!("a prompt of two tokens");
    };
    assert_eq!(generate(&[*first]).timings.prefill_tokens, 1);
    assert_eq!(generate(&[*last]).timings.prefill_tokens, 1);
}

#[test]
fn generate_stop_token_ends_the_text() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let mut options = greedy(&gemma, 16);
    options.ignore_stop_tokens = false;
    options.stop_tokens = vec![fixture.generated[3]];
    let mut seen = Vec::new();
    let generation = gemma
        .generate(fixture.prompt.clone(), &options, |token| {
            seen.push(token.id);
            ControlFlow::Continue(())
        })
        .expect("the generation succeeds");
    assert_eq!(generation.finish_reason, FinishReason::Stop);
    assert_eq!(generation.tokens, fixture.generated[..4]);
    assert_eq!(seen, fixture.generated[..3]);

    // In a batch, a sequence ends at its stop token, and the other sequence continues.
    let batch: Vec<Prompt> = vec![
        fixture.prompt.clone().into(),
        fixture.prompt[9..].to_vec().into(),
    ];
    let generations = gemma
        .generate_batch(&batch, &options)
        .expect("the generations succeed");
    assert_eq!(generations[0].tokens, fixture.generated[..4]);
    let alone = tokens(&gemma, &fixture.prompt[9..], &options);
    assert_eq!(generations[1].tokens, alone);
}

#[test]
fn generate_callback_ends_the_text() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let generation = gemma
        .generate(
            fixture.prompt.clone(),
            &greedy(&gemma, 16),
            |token| match token.id == fixture.generated[2] {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            },
        )
        .expect("the generation succeeds");
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert_eq!(generation.tokens, fixture.generated[..3]);
}

#[test]
fn generate_last_position_ends_the_text() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let positions = gemma.config().max_position_embeddings;
    let prompt = vec![50; positions - 3];
    let generation = gemma
        .generate(prompt, &greedy(&gemma, 16), |_| ControlFlow::Continue(()))
        .expect("the generation succeeds");
    assert_eq!(generation.finish_reason, FinishReason::Length);
    assert_eq!(generation.tokens.len(), 3);
}

#[test]
fn generate_seed_fixes_the_sampled_tokens() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let sampled = |seed| {
        let options = GenerateOptions {
            sampling: Sampling {
                temperature: 2.0,
                seed: Some(seed),
                ..Sampling::greedy()
            },
            ..greedy(&gemma, 12)
        };
        tokens(&gemma, &fixture.prompt, &options)
    };
    assert_eq!(sampled(1), sampled(1));
    assert_ne!(sampled(1), sampled(2));
}

/// The token that ends a turn stops an answer, although the checkpoint of the embedded base model lists only `<eos>` as a
/// stop token.
#[test]
fn chat_options_stop_at_the_end_of_a_turn() {
    let gemma =
        Gemma4::embedded(&Device::flex(), LoadOptions::new()).expect("the embedded model loads");
    let end = gemma
        .tokenizer()
        .id("<turn|>")
        .expect("the tokenizer has the token");
    assert_eq!(gemma.options().stop_tokens, gemma.defaults().stop_tokens);
    assert!(!gemma.options().stop_tokens.contains(&end));
    let own = gemma.options().stop_tokens;
    assert_eq!(gemma.chat_options().stop_tokens, [own, vec![end]].concat());
}

#[test]
fn generate_wrong_arguments_are_refused() {
    let gemma =
        Gemma4::embedded(&Device::flex(), LoadOptions::new()).expect("the embedded model loads");
    let good = greedy(&gemma, 4);
    let words =
        |prompt: Vec<u32>, options: &GenerateOptions| match gemma
            .generate(prompt, options, |_| ControlFlow::Continue(()))
        {
            Err(error @ Gemma4Error::Argument { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        };
    assert!(words(vec![], &good).contains("prompt: has no tokens"));
    assert!(words(vec![2, 2048], &good).contains("the token 2048"));
    assert!(words(vec![2; 33_000], &good).contains("33000 tokens"));
    assert!(
        words(
            vec![2],
            &GenerateOptions {
                max_tokens: 0,
                ..good.clone()
            }
        )
        .contains("max_tokens")
    );
    let chunked = GenerateOptions {
        prefill_chunk: Some(0),
        ..good.clone()
    };
    assert!(words(vec![2], &chunked).contains("prefill_chunk"));
    let sampling = Sampling {
        temperature: -1.0,
        ..Sampling::greedy()
    };
    assert!(words(vec![2], &GenerateOptions { sampling, ..good }).contains("temperature"));
}

/// The trained model that `burn-gemma4` embeds loads on every device in the device's default dtype, and generates
/// tokens.
#[test]
fn generate_with_the_embedded_model_gives_tokens() {
    for device in crate::devices::devices() {
        let gemma =
            Gemma4::embedded(&device.device, LoadOptions::new()).expect("the embedded model loads");
        let generation = gemma
            .generate("hello", &greedy(&gemma, 6), |_| ControlFlow::Continue(()))
            .expect("the generation succeeds");
        assert_eq!(generation.tokens.len(), 6, "{}", device.name);
    }
}
