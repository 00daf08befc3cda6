//! Tests prompts whose prefill replays a CUDA graph. A graph processes a fixed number of tokens, to which shorter
//! prompts are padded. With a graph, the logits, the KV cache and the next decode steps must be the same as with
//! separate kernel launches.
//!
//! On a device without CUDA graphs, the first attempt to capture a graph fails. The prompt of this attempt still runs
//! padded. All later prompts use separate launches without padding.

use crate::fixture::{assert_close, greedy, on_every_device, tokens, values};
use burn_gemma4::{Gemma4, Logits, PromptGraphs};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::ops::ControlFlow;
use std::thread;

/// Prefills `prompt`, and then decodes the tokens in `after` one at a time. Returns the logits after the prompt and
/// after each decode step.
fn logits(
    gemma: &Gemma4,
    graphs: Option<&PromptGraphs>,
    prompt: &[u32],
    after: &[u32],
) -> Vec<f32> {
    let model = gemma.model();
    let mut cache = model.cache(vec![0]);
    let mut found = match graphs {
        Some(graphs) => {
            let next = graphs.read(prompt, &mut cache).expect("the tokens fit");
            next.logits().expect("the device works")
        }
        None => {
            let tokens = tokens(&[prompt], &gemma.device());
            let logits = model.step(tokens, &mut cache, Logits::Last(1));
            values(
                logits
                    .expect("the tokens fit")
                    .expect("logits of one position"),
            )
        }
    };
    assert_eq!(cache.len(), prompt.len());
    let mut decoder = model.decoder(&mut cache);
    for token in after {
        let next = decoder.step(&[*token]).expect("the token fits");
        found.extend(next.logits().expect("the device works"));
    }
    found
}

#[test]
fn prompt_by_graph_matches_separate_launches() {
    on_every_device(|fixture, gemma, _| {
        let graphs = PromptGraphs::new(gemma.model().clone());
        let vocabulary = gemma.config().vocab_size as u32;
        let mut rng = StdRng::seed_from_u64(11);
        // Nearly all of these lengths are padded to 32 or to 64 tokens. Each of these two graphs thus runs for prompts
        // of different lengths.
        for length in [20, 32, 33, 64, 1, 31, 2, 32, 50, 8, 65, 40, 63, 17] {
            let mut draw = |count: usize| -> Vec<u32> {
                (0..count)
                    .map(|_| rng.random_range(0..vocabulary))
                    .collect()
            };
            let (prompt, after) = (draw(length), draw(3));
            let found = logits(gemma, Some(&graphs), &prompt, &after);
            let expected = logits(gemma, None, &prompt, &after);
            assert_close(
                &found,
                &expected,
                &format!("{}, {length} tokens", fixture.name),
            );
        }
    });
}

/// Checks tokens that continue a text. Each graph continues texts of several lengths, so the copy of earlier keys and
/// values that the graph reads must be refilled. The expected logits come from separate launches.
#[test]
fn continued_text_by_graph_matches_separate_launches() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        let model = gemma.model();
        let vocabulary = gemma.config().vocab_size as u32;
        let window = gemma.config().sliding_window;
        let mut rng = StdRng::seed_from_u64(17);
        let graphs = PromptGraphs::new(model.clone());
        for (past, count) in [(40, 9), (window, 30), (3, 5), (70, 32), (55, 1), (90, 20)] {
            let mut draw = |count: usize| -> Vec<u32> {
                (0..count)
                    .map(|_| rng.random_range(0..vocabulary))
                    .collect()
            };
            let (earlier, rest, after) = (draw(past), draw(count), draw(2));
            let run = |graphs: Option<&PromptGraphs>| {
                let mut cache = model.cache(vec![0]);
                let step = |cache: &mut _, text: &[u32]| {
                    let tokens = tokens(&[text], &gemma.device());
                    let logits = model.step(tokens, cache, Logits::Last(1));
                    values(logits.expect("the tokens fit").expect("one position"))
                };
                step(&mut cache, &earlier);
                let mut found = match graphs {
                    Some(graphs) => {
                        let next = graphs.read(&rest, &mut cache).expect("the tokens fit");
                        next.logits().expect("the device works")
                    }
                    None => step(&mut cache, &rest),
                };
                assert_eq!(cache.len(), past + count);
                for token in &after {
                    found.extend(step(&mut cache, &[*token]));
                }
                found
            };
            let case = format!("{}, {count} tokens after {past}", fixture.name);
            assert_close(&run(Some(&graphs)), &run(None), &case);
        }
    });
}

/// Checks generations on threads that did not load the weights. One thread uses a stream of its own, and another thread
/// uses the stream on which the weights were loaded.
#[test]
fn generation_on_another_thread_equals_that_of_the_loading_thread() {
    on_every_device(|fixture, gemma, _| {
        let options = greedy(gemma, 8);
        let check = || {
            for _ in 0..3 {
                let generation = gemma.generate(fixture.prompt.clone(), &options, |_| {
                    ControlFlow::Continue(())
                });
                let tokens = generation.expect("the prompt fits").tokens;
                assert_eq!(tokens, fixture.generated[..8], "{}", fixture.name);
            }
        };
        thread::scope(|scope| scope.spawn(check).join()).expect("the tokens are equal");
        thread::scope(|scope| scope.spawn(|| gemma.on_stream_of_weights(check)).join())
            .expect("the tokens are equal");
        check();
    });
}

/// Checks repeated generations for the same prompt. The first generation runs without a graph, and later generations
/// replay a graph. All generations must give the same tokens.
#[test]
fn generation_by_graph_equals_first_generation() {
    on_every_device(|fixture, gemma, _| {
        let options = greedy(gemma, 8);
        let generate = |prompt: &[u32]| {
            let generation =
                gemma.generate(prompt.to_vec(), &options, |_| ControlFlow::Continue(()));
            generation.expect("the prompt fits").tokens
        };
        for _ in 0..4 {
            assert_eq!(
                generate(&fixture.prompt),
                fixture.generated[..8],
                "{}",
                fixture.name
            );
            generate(&fixture.prompt[1..]);
        }
    });
}
