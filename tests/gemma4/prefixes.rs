//! Tests the prefix cache: a prompt that continues from an earlier prompt's keys and values must generate the same
//! tokens as without the prefix cache. Earlier prompts stay usable after their sequences were decoded in a batch.

use crate::fixture::{greedy, on_every_device};
use burn::tensor::Device;
use burn_gemma4::{
    Batch, CacheKind, Gemma4, GenerateOptions, KvPrecision, LoadOptions, Prefill, PrefixCache,
    RowChoice, RowResult,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::ops::ControlFlow;

const TOKENS: usize = 5;

/// Prefills a prompt with the prefix cache, decodes its answer in a batch, and keeps the prompt's keys and values in
/// the prefix cache. Returns the answer, and the number of reused prompt tokens.
fn answer(
    gemma: &Gemma4,
    prefixes: &mut PrefixCache,
    batch: &mut Batch,
    prompt: &[u32],
    kind: CacheKind,
    chunk: usize,
) -> (Vec<u32>, usize) {
    let choose = |results: Vec<RowResult>| results[0].token().expect("the logits are finite");
    // The test does not call `Gemma4::prefill`, because this function may not use the prefix cache. On a Hopper card,
    // it runs the whole prompt with a CUDA graph instead, which is faster.
    let mut prefill = Prefill::new(gemma.model(), prompt.to_vec(), kind).expect("the prompt fits");
    prefixes.resume(&mut prefill);
    let reused = prefill.reused();
    assert_eq!(prefill.remaining(), prompt.len() - reused);
    let first = loop {
        if let Some(logits) = prefill.advance(chunk).expect("the device works") {
            break choose(logits.choose(&[RowChoice::Argmax]).expect("one row"));
        }
    };
    batch.join(&prefill).expect("all is read");
    prefixes.keep(prefill);
    let mut tokens = vec![first];
    while tokens.len() < TOKENS {
        let last = [tokens[tokens.len() - 1]];
        let next = batch.step(&last).expect("the token fits");
        tokens.push(choose(next.choose(&[RowChoice::Argmax]).expect("one row")));
    }
    batch.leave(0);
    (tokens, reused)
}

/// Returns the tokens that the model generates after a prompt, without the prefix cache.
fn generated(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    let generation = gemma.generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()));
    generation.expect("the generation succeeds").tokens
}

fn drawn(rng: &mut StdRng, gemma: &Gemma4, count: usize) -> Vec<u32> {
    let vocabulary = gemma.config().vocab_size as u32;
    (0..count)
        .map(|_| rng.random_range(0..vocabulary))
        .collect()
}

/// Four prompts share a prefix that is longer than the sliding window of 8 or 16 tokens. While the second prompt is
/// prefilled, a checkpoint (a copy of the ring buffers) is taken at the end of the prefix. The third and fourth prompts
/// continue from this checkpoint, so they reuse the whole prefix.
#[test]
fn resume_of_a_shared_prefix_gives_the_tokens_of_the_prompt_alone() {
    on_every_device(|fixture, gemma, device| {
        // CubeCL devices compile kernels for each length. On software drivers this takes minutes per model.
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        for (compact_keys, precision) in [
            (false, KvPrecision::Model),
            (true, KvPrecision::Model),
            (false, KvPrecision::Q8),
        ] {
            let kind = CacheKind {
                compact_keys,
                precision,
            };
            let Ok(mut batch) = Batch::new(gemma.model(), kind) else {
                continue;
            };
            let options = GenerateOptions {
                compact_keys,
                kv_precision: precision,
                ..greedy(gemma, TOKENS)
            };
            let mut rng = StdRng::seed_from_u64(11);
            let mut prefixes = PrefixCache::new(gemma.model(), usize::MAX, usize::MAX);
            // The buffers of full-attention layers grow in blocks of 256 slots (token positions). A prefix of 256
            // tokens fills a whole block.
            let numbers: &[usize] = match device.is_cube() {
                true => &[256],
                false => &[66, 100, 256],
            };
            for &shared in numbers {
                let prefix = drawn(&mut rng, gemma, shared);
                let mut all_reused = Vec::new();
                for turn in 0..4 {
                    let rest = rng.random_range(1..30);
                    let prompt = [&prefix[..], &drawn(&mut rng, gemma, rest)].concat();
                    let expected = generated(gemma, &prompt, &options);
                    let chunk = rng.random_range(8..100);
                    let (tokens, reused) =
                        answer(gemma, &mut prefixes, &mut batch, &prompt, kind, chunk);
                    let what = format!(
                        "{} on {}, {kind:?}, {shared} shared tokens, turn {turn}",
                        fixture.name, device.name
                    );
                    assert_eq!(tokens, expected, "{what}");
                    assert!(reused < prompt.len(), "{what}");
                    all_reused.push(reused);
                }
                // The token after the prefix is random and may equal another prompt's token by chance. So a prompt may
                // reuse more tokens than the prefix has.
                assert!(
                    all_reused[0] < shared && all_reused[2..].iter().all(|count| *count >= shared),
                    "{}: {shared} shared tokens, reused {all_reused:?}",
                    fixture.name
                );
            }
        }
    });
}

/// In a conversation, each prompt begins with the whole earlier prompt. The prefix cache then drops the keys and values
/// of the earlier prompt, and keeps those of the new prompt.
#[test]
fn keep_of_a_continued_prompt_replaces_the_earlier_prompt() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() {
            return;
        }
        let kind = CacheKind::default();
        let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
        let mut prefixes = PrefixCache::new(gemma.model(), usize::MAX, usize::MAX);
        let mut rng = StdRng::seed_from_u64(12);
        let mut prompt = drawn(&mut rng, gemma, 40);
        let mut before = 0;
        for _ in 0..4 {
            let expected = generated(gemma, &prompt, &greedy(gemma, TOKENS));
            let (tokens, reused) =
                answer(gemma, &mut prefixes, &mut batch, &prompt, kind, usize::MAX);
            assert_eq!(tokens, expected, "{}", fixture.name);
            assert_eq!(reused, before, "{}", fixture.name);
            before = prompt.len();
            prompt.extend(&tokens);
            prompt.extend(drawn(&mut rng, gemma, 25));
        }
        // The prefix cache must hold only the last prompt, which has fewer than 256 tokens. The KV caches of all four
        // prompts would take several times as much memory.
        let mut alone = PrefixCache::new(gemma.model(), usize::MAX, usize::MAX);
        prompt.truncate(before);
        answer(gemma, &mut alone, &mut batch, &prompt, kind, usize::MAX);
        assert!(
            prefixes.bytes() < 2 * alone.bytes(),
            "{}: {} bytes, alone {}",
            fixture.name,
            prefixes.bytes(),
            alone.bytes()
        );
    });
}

#[test]
fn keep_beyond_the_memory_limit_drops_the_least_recently_used_prompt() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() {
            return;
        }
        let kind = CacheKind::default();
        let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
        let mut rng = StdRng::seed_from_u64(13);
        let prompts: Vec<Vec<u32>> = (0..3).map(|_| drawn(&mut rng, gemma, 50)).collect();
        let mut one = PrefixCache::new(gemma.model(), usize::MAX, usize::MAX);
        answer(gemma, &mut one, &mut batch, &prompts[0], kind, 64);
        // Two prompts fit into the prefix cache. The first prompt is used again before the third prompt is kept, so the
        // second prompt is dropped.
        let mut prefixes = PrefixCache::new(gemma.model(), one.bytes() * 5 / 2, usize::MAX);
        let mut reused = |index: usize| {
            let prompt = [&prompts[index][..], &[7]].concat();
            answer(gemma, &mut prefixes, &mut batch, &prompt, kind, 64).1
        };
        let all: Vec<usize> = [0, 1, 0, 2, 0, 1].map(&mut reused).to_vec();
        assert_eq!(all, [0, 0, 50, 0, 50, 0], "{}", fixture.name);
        assert!(prefixes.bytes() <= one.bytes() * 5 / 2);
        let mut nothing = PrefixCache::new(gemma.model(), 0, usize::MAX);
        for _ in 0..2 {
            let (_, reused) = answer(gemma, &mut nothing, &mut batch, &prompts[0], kind, 64);
            assert_eq!((reused, nothing.bytes()), (0, 0));
        }
    });
}

/// Tests prompts that are about as long as the sliding window of 128 tokens. If a prompt is shorter than the window,
/// its ring buffers hold all of its tokens. The next prompt can then continue after any of these tokens without a
/// checkpoint.
#[test]
fn resume_near_the_end_of_the_window_gives_the_tokens_of_the_prompt_alone() {
    let device = Device::flex();
    let gemma = Gemma4::embedded(&device, LoadOptions::new()).expect("the model loads");
    let window = gemma.config().sliding_window;
    let kind = CacheKind::default();
    let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
    let mut rng = StdRng::seed_from_u64(14);
    for first in window - 2..=window + 2 {
        for shared in [20, window - 2, window - 1, window, window + 1] {
            let mut prefixes = PrefixCache::new(gemma.model(), usize::MAX, usize::MAX);
            let earlier = drawn(&mut rng, &gemma, first);
            answer(&gemma, &mut prefixes, &mut batch, &earlier, kind, 50);
            let shared = shared.min(first);
            let prompt = [&earlier[..shared], &drawn(&mut rng, &gemma, 9)].concat();
            let expected = generated(&gemma, &prompt, &greedy(&gemma, TOKENS));
            let (tokens, reused) = answer(&gemma, &mut prefixes, &mut batch, &prompt, kind, 50);
            let what = format!("{shared} of {first} tokens shared, {reused} reused");
            assert_eq!(tokens, expected, "{what}");
            // If a prompt is shorter than the window, the ring buffers hold all of its tokens. If it is longer, the
            // ring buffers hold only its last tokens. The next prompt can then continue only directly before or
            // directly after the last token.
            let is_held = first < window || shared + 1 >= first;
            assert_eq!(reused >= shared, is_held, "{what}");
        }
    }
}

/// Two prompts continue the same earlier prompt. In the prefix cache, the first of the two replaces the earlier prompt.
/// A checkpoint (a copy of the ring buffers) is kept at the earlier prompt's end. The second of the two continues from
/// this checkpoint.
#[test]
fn resume_from_a_replaced_prompt_reuses_all_its_tokens() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() {
            return;
        }
        let kind = CacheKind::default();
        let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
        let mut prefixes = PrefixCache::new(gemma.model(), usize::MAX, usize::MAX);
        let mut rng = StdRng::seed_from_u64(15);
        let earlier = drawn(&mut rng, gemma, 70);
        let mut all_reused = Vec::new();
        for count in [0, 30, 40] {
            let prompt = [&earlier[..], &drawn(&mut rng, gemma, count)].concat();
            let expected = generated(gemma, &prompt, &greedy(gemma, TOKENS));
            let (tokens, reused) = answer(gemma, &mut prefixes, &mut batch, &prompt, kind, 33);
            assert_eq!(tokens, expected, "{}", fixture.name);
            all_reused.push(reused.min(earlier.len()));
        }
        assert_eq!(all_reused, [0, 70, 70], "{}", fixture.name);
    });
}

#[test]
fn resume_of_another_models_prompt_does_nothing() {
    let gemma = || Gemma4::embedded(&Device::flex(), LoadOptions::new()).expect("the model loads");
    let (one, other) = (gemma(), gemma());
    let kind = CacheKind::default();
    let mut batch = Batch::new(one.model(), kind).expect("the format is supported");
    let mut prefixes = PrefixCache::new(one.model(), usize::MAX, usize::MAX);
    let prompt: Vec<u32> = (2..40).collect();
    answer(&one, &mut prefixes, &mut batch, &prompt, kind, 64);
    let mut prefill = Prefill::new(other.model(), prompt, kind).expect("the prompt fits");
    prefixes.resume(&mut prefill);
    assert_eq!(prefill.reused(), 0);
}
