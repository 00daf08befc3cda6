//! Tests `Decoder::follow`, which launches the next forward pass before the host has the tokens of the current pass.
//! The early forward pass is called a pass ahead. `follow` must give the same tokens as separate decode steps. A
//! discarded pass ahead leaves no trace in the cache. The texts are longer than the window and than the allocated
//! buffers.

use crate::devices::devices;
use crate::fixture::{Fixture, assert_close, greedy, tokens, values};
use burn::tensor::{DType, Device};
use burn_gemma4::{Cache, Decoder, Gemma4Model, Logits, Sampler, Sampling, Token};
use std::ops::ControlFlow;

/// Returns true if the device samples tokens by kernels instead of on the host.
fn chooses(device: &Device) -> bool {
    *device != Device::flex()
}

/// Returns a cache that holds `batch` copies of `text`. If `ragged` is true, `2 · i` padding tokens replace the first
/// tokens of row `i`.
fn begun(model: &Gemma4Model, text: &[u32], batch: usize, ragged: bool, spare: usize) -> Cache {
    let padding: Vec<usize> = (0..batch)
        .map(|row| if ragged { 2 * row } else { 0 })
        .collect();
    let mut cache = model.cache(padding.clone()).forgetting(spare);
    let rows: Vec<Vec<u32>> = padding
        .iter()
        .map(|padding| [vec![7; *padding], text[*padding..].to_vec()].concat())
        .collect();
    let rows: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
    let read = model.step(tokens(&rows, &model.device()), &mut cache, Logits::None);
    read.expect("the step succeeds");
    cache
}

/// Runs a decode step that processes the tokens in `read`, one per sequence. Returns the next token of each sequence.
fn stepped(decoder: &mut Decoder<'_>, read: &[u32], samplers: &mut [Sampler]) -> Vec<u32> {
    let next = decoder.step(read).expect("the step succeeds");
    match samplers.is_empty() {
        true => next.argmax(),
        false => next.sample(samplers),
    }
    .expect("the tokens are valid")
}

/// Processes the tokens in `read`, one per sequence, and returns the next token of each sequence. The function calls
/// `follow`. If the device does not sample tokens, the function runs a separate decode step instead.
fn followed(
    decoder: &mut Decoder<'_>,
    read: &[u32],
    goes_on: bool,
    samplers: &mut [Sampler],
    device: &Device,
) -> Vec<u32> {
    let next = decoder.follow(read, goes_on).expect("the pass succeeds");
    assert_eq!(next.is_some(), chooses(device));
    let Some(next) = next else {
        return stepped(decoder, read, samplers);
    };
    let next: Vec<u32> = next
        .into_iter()
        .map(|token| token.expect("there is a token"))
        .collect();
    for (sampler, token) in samplers.iter_mut().zip(&next) {
        sampler.read(&[*token]);
    }
    next
}

#[test]
fn decoder_follow_gives_the_tokens_of_steps() {
    for device in devices() {
        for (name, batch, ragged, spare, drawn) in [
            ("dense-ple", 1, false, 0, false),
            ("dense-ple", 3, true, 0, true),
            ("dense-keqv", 2, false, 3, false),
            ("moe", 1, false, 0, true),
        ] {
            let what = format!("{name} {} batch {batch}", device.name);
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            let model = gemma.model();
            let sampling = Sampling {
                temperature: 1.3,
                top_k: Some(60),
                repetition_penalty: 1.3,
                seed: Some(3),
                ..Sampling::greedy()
            };
            let samplers = || -> Vec<Sampler> {
                let count = if drawn { batch } else { 0 };
                let mut samplers = vec![Sampler::new(&sampling); count];
                for sampler in &mut samplers {
                    sampler.read(&fixture.prompt);
                }
                samplers
            };
            // The first run uses separate steps. The second run uses `follow`, which launches the next forward pass early.
            // Some of these passes are discarded, because the caller continues differently or not at all.
            let mut texts: Vec<Vec<Vec<u32>>> = Vec::new();
            let mut after: Vec<Vec<f32>> = Vec::new();
            for by_passes in [false, true] {
                let mut cache = begun(model, &fixture.prompt, batch, ragged, spare);
                let mut own = samplers();
                let start = cache.len();
                let mut text = vec![vec![fixture.generated[0]; batch]];
                {
                    let given = samplers();
                    let given: Vec<&Sampler> = given.iter().collect();
                    let mut decoder = model.decoder(&mut cache);
                    if drawn {
                        decoder = decoder
                            .with_samplers(&given)
                            .expect("there is a sampler for each sequence");
                    }
                    for column in 0..26 {
                        let mut read = text.last().expect("the text is not empty").clone();
                        if !drawn && column % 7 == 5 {
                            // The caller continues with a token that the decoder did not choose.
                            read[batch - 1] = read[batch - 1] % 50 + 2;
                        }
                        text.last_mut()
                            .expect("the text is not empty")
                            .clone_from(&read);
                        let next = match by_passes && column % 9 != 8 {
                            true => {
                                let goes_on = column % 5 != 3;
                                followed(&mut decoder, &read, goes_on, &mut own, &device.device)
                            }
                            false => stepped(&mut decoder, &read, &mut own),
                        };
                        text.push(next);
                        assert_eq!(decoder.cache().len(), start + column + 1, "{what}");
                        if spare > 0 && column == 22 {
                            // The caller removes one token from the cache, so this step is one position earlier than the
                            // forward pass that was launched early.
                            let last = text.last().expect("the text is not empty").clone();
                            decoder.forget(1).expect("the cache has a spare column");
                            let next = match by_passes {
                                true => {
                                    followed(&mut decoder, &last, false, &mut own, &device.device)
                                }
                                false => stepped(&mut decoder, &last, &mut own),
                            };
                            *text.last_mut().expect("the text is not empty") = next;
                        }
                        if spare > 0 && column == 20 {
                            decoder.forget(2).expect("the cache has spare slots");
                            for column in [19, 20] {
                                let again = text[column].clone();
                                stepped(&mut decoder, &again, &mut own);
                            }
                        }
                    }
                }
                // Without the decode kernels, the layers compute one more step over the keys and values that the decode
                // kernels have written. The logits of this step show whether both runs left the same cache.
                let rows: Vec<&[u32]> = text
                    .last()
                    .expect("the text is not empty")
                    .chunks(1)
                    .collect();
                let read = tokens(&rows, &device.device);
                let logits = model
                    .step(read, &mut cache, Logits::All)
                    .expect("the step succeeds");
                after.push(values(logits.expect("logits were requested")));
                texts.push(text);
            }
            assert_eq!(texts[0], texts[1], "{what}");
            assert_close(&after[1], &after[0], &what);
        }
    }
}

fn proceed(_: &Token<'_>) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A session can go back to an earlier position of its text even if its ring buffers are nearly full. Discarded forward
/// passes do not shorten the distance that the session can go back.
#[test]
fn session_goes_back_after_discarded_passes() {
    for device in devices() {
        let fixture = Fixture::open("dense-ple");
        let gemma = fixture.load(&device.device, DType::F32);
        let window = gemma.config().sliding_window;
        for answer in 1..=4 {
            let prompt = &fixture.prompt[..(window - 2).min(fixture.prompt.len())];
            let mut session = gemma.session();
            let options = greedy(&gemma, answer);
            let first = session.generate(prompt.to_vec(), &options, proceed);
            let first = first.expect("the generation succeeds");
            // After its first prompt, the session gets two more prompts. The prompt `other` begins with the first half of the
            // first prompt. The prompt `longer` is the first prompt with the generated answer.
            let other = [&prompt[..prompt.len() / 2], &fixture.generated[..3]].concat();
            let longer = [prompt, &first.tokens[..]].concat();
            for next in [other, longer] {
                let found = session.generate(next.clone(), &options, proceed);
                let alone = gemma.generate(next, &options, proceed);
                assert_eq!(
                    found.expect("the generation succeeds").tokens,
                    alone.expect("the generation succeeds").tokens,
                    "{} answer {answer}",
                    device.name
                );
            }
        }
    }
}
