//! Tests speculative decoding in batches: every text equals the text without draft tokens. The sequences have different
//! lengths, accept different numbers of draft tokens, and end at different times. Tokens are chosen greedily or
//! sampled. Some forward passes have few enough rows for the decode kernels, and others have too many.

use crate::devices::devices;
use crate::drafts;
use crate::fixture::{Fixture, folder, greedy};
use crate::programs::folder::{Folder, WRITING};
use burn::tensor::{DType, Device};
use burn_gemma4::{Drafts, Gemma4, GenerateOptions, Generation, LoadOptions, Prompt, Sampling};
use std::path::Path;

fn generate(gemma: &Gemma4, prompts: &[Vec<u32>], options: &GenerateOptions) -> Vec<Generation> {
    let prompts: Vec<Prompt> = prompts.iter().cloned().map(Prompt::from).collect();
    gemma
        .generate_batch(&prompts, options)
        .expect("the generations succeed")
}

/// Returns four prompts. Prompt lookup finds many draft tokens after the first prompt, some after the second, and few after
/// the last two.
fn prompts_of(fixture: &Fixture) -> Vec<Vec<u32>> {
    let (prompt, generated) = (&fixture.prompt[..], &fixture.generated[..]);
    vec![
        [prompt, generated, prompt, &generated[..8]].concat(),
        vec![2, 50, 60, 50, 60],
        prompt.to_vec(),
        vec![2, 300, 17],
    ]
}

/// Asserts that a batch generates the same texts with draft tokens as without. Returns the number of accepted draft
/// tokens per sequence.
fn assert_same(
    gemma: &Gemma4,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    what: &str,
) -> Vec<usize> {
    let plain = GenerateOptions {
        drafts: Drafts::None,
        draft_tokens: None,
        ..options.clone()
    };
    let expected = generate(gemma, prompts, &plain);
    let found = generate(gemma, prompts, options);
    assert_eq!(found.len(), expected.len());
    let pairs = found.iter().zip(&expected).enumerate();
    pairs
        .map(|(row, (found, expected))| {
            let what = format!("{what}, sequence {row} of {}", prompts.len());
            drafts::assert_same(found, expected, &what);
            found.drafts.accepted
        })
        .collect()
}

#[test]
fn drafted_batch_greedy_texts_equal_those_without_drafts() {
    for device in devices() {
        let is_flex = device.device == Device::flex();
        // Fewer cases run on devices that run CubeCL kernels, because these devices compile new kernels for every number of
        // rows.
        let (names, paces): (&[&'static str], &[_]) = match is_flex {
            true => (
                &["dense-ple", "dense-keqv", "moe"],
                &[None, Some(1), Some(3), Some(8)],
            ),
            false => (&["dense-ple"], &[Some(3)]),
        };
        for name in names {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            let prompts = prompts_of(&fixture);
            let mut differ = false;
            for count in if is_flex { 2..=4 } else { 2..=3 } {
                for draft_tokens in paces {
                    let options = GenerateOptions {
                        drafts: Drafts::Lookup,
                        draft_tokens: *draft_tokens,
                        compact_keys: *draft_tokens == Some(3),
                        ..greedy(&gemma, if is_flex { 40 } else { 20 })
                    };
                    let what = format!("{name} {} {draft_tokens:?}", device.name);
                    let accepted = assert_same(&gemma, &prompts[..count], &options, &what);
                    differ |= accepted[0] != accepted[1];
                }
            }
            assert!(
                differ,
                "{name} {}: all sequences accept the same number of draft tokens",
                device.name
            );
        }
    }
}

/// The decode kernels process at most 8 tokens per forward pass. A batch of ten sequences exceeds this limit even
/// without draft tokens. For such a batch, the decoder uses draft tokens only if `draft_tokens` sets their number.
#[test]
fn drafted_batch_of_many_sequences_drafts_only_with_draft_tokens() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let prompts: Vec<Vec<u32>> = prompts_of(&fixture).into_iter().cycle().take(10).collect();
    for draft_tokens in [None, Some(2)] {
        let options = GenerateOptions {
            drafts: Drafts::Lookup,
            draft_tokens,
            ..greedy(&gemma, 12)
        };
        let accepted = assert_same(&gemma, &prompts, &options, "ten");
        let some = accepted.iter().any(|accepted| *accepted > 0);
        assert_eq!(some, draft_tokens.is_some());
    }
}

/// With the same seed, a batch samples the same tokens with draft tokens as without. The host samples these tokens whatever
/// the model's device is, so the test runs on the CPU device only.
#[test]
fn drafted_batch_seed_gives_the_tokens_without_drafts() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    for seed in 0..6 {
        for repetition_penalty in [1.0, 1.2] {
            let options = GenerateOptions {
                drafts: Drafts::Lookup,
                draft_tokens: Some(3),
                sampling: Sampling {
                    temperature: 0.7,
                    top_k: Some(20),
                    top_p: Some(0.9),
                    repetition_penalty,
                    seed: Some(seed),
                    ..Sampling::greedy()
                },
                logprobs: (seed % 2 == 0).then_some(2),
                ..greedy(&gemma, 24)
            };
            let what = format!("{seed} {repetition_penalty}");
            assert_same(&gemma, &prompts_of(&fixture)[..2], &options, &what);
        }
    }
}

/// If a sequence ends at a stop token between accepted draft tokens, a batch gives the same texts as without draft tokens.
/// The ended sequence stays in the batch until all other sequences have ended.
#[test]
fn drafted_batch_sequences_end_separately() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let prompts = &prompts_of(&fixture)[..3];
        let options = GenerateOptions {
            drafts: Drafts::Lookup,
            draft_tokens: Some(1),
            ..greedy(&gemma, 24)
        };
        let whole = generate(&gemma, prompts, &options);
        let rows = if device.device == Device::flex() {
            3
        } else {
            1
        };
        for (row, text) in whole.iter().take(rows).enumerate() {
            let ending = GenerateOptions {
                stop_tokens: vec![text.tokens[5 + 4 * row]],
                ignore_stop_tokens: false,
                ..options.clone()
            };
            assert_same(&gemma, prompts, &ending, &format!("{} {row}", device.name));
        }
    }
}

/// Batches with a drafter give the same texts as without a drafter. The first model's drafter is built to predict the
/// model's text, so the model accepts draft tokens in all sequences. The drafters of the other models have random
/// weights, so these models reject most draft tokens.
#[test]
fn drafted_batch_with_drafter_equals_texts_without() {
    let chain = Folder::that_writes(&WRITING);
    let of_chain = chain.drafter_of_chain();
    let from = |index: usize, before: usize| [&vec![2; before][..], &[WRITING[index]]].concat();
    for device in devices() {
        let is_flex = device.device == Device::flex();
        let load = |path: &Path, drafter: &Path| {
            let options = LoadOptions::new().dtype(DType::F32);
            let gemma = Gemma4::load(path, &device.device, options).expect("the model is valid");
            gemma
                .with_drafter(drafter)
                .expect("the drafter fits the model")
        };
        let options = |gemma: &Gemma4, draft_tokens| GenerateOptions {
            drafts: Drafts::Drafter,
            draft_tokens,
            ..greedy(gemma, if is_flex { 16 } else { 10 })
        };
        let gemma = load(chain.path(), of_chain.path());
        let prompts = [from(0, 1), from(5, 4), from(2, 2), from(9, 1)];
        let cases = [(2, None), (4, Some(1)), (3, Some(1)), (4, Some(3))];
        for (count, draft_tokens) in cases.into_iter().take(if is_flex { 4 } else { 2 }) {
            let options = options(&gemma, draft_tokens);
            let what = format!("{} {draft_tokens:?}", device.name);
            let accepted = assert_same(&gemma, &prompts[..count], &options, &what);
            assert!(
                accepted.iter().all(|accepted| *accepted > 2),
                "{what}: {accepted:?}"
            );
        }
        let pairs = [
            ("dense-ple", "assistant-ple"),
            ("dense-keqv", "assistant-keqv"),
        ];
        for (target, drafter) in pairs.into_iter().take(if is_flex { 2 } else { 0 }) {
            let gemma = load(&folder(target), &folder(drafter));
            let texts = prompts_of(&Fixture::open(target));
            for draft_tokens in [None, Some(3)] {
                let options = options(&gemma, draft_tokens);
                let what = format!("{target} {} {draft_tokens:?}", device.name);
                assert_same(&gemma, &texts[..2], &options, &what);
            }
        }
    }
}
