//! Tests batches that sequences join and leave between decode steps. A sequence must generate the same tokens in a
//! batch as alone. The number and the lengths of the other sequences must not matter, and neither must the storage
//! format of the KV cache.

use crate::fixture::{greedy, on_every_device};
use burn_gemma4::{
    Batch, CacheKind, Gemma4, GenerateOptions, KvPrecision, Prefill, RowChoice, RowResult, Sampler,
    Sampling,
};
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::ops::ControlFlow;

const TOKENS: usize = 6;

/// A sequence that joins and leaves the batch during the test.
struct Sequence {
    prompt: Vec<u32>,
    expected: Vec<u32>,
    tokens: Vec<u32>,
    /// The number of generated tokens after which the sequence leaves the batch.
    end: usize,
}

fn alone(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Vec<u32> {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
        .tokens
}

fn token(results: &[RowResult]) -> u32 {
    results[0].token().expect("the logits are finite")
}

/// Returns the drawn token. If the device has not drawn it, draws it from the logits without recording it.
fn drawn(result: &RowResult, sampler: &Sampler) -> u32 {
    match result {
        RowResult::Token(token) => token.expect("the logits are finite"),
        RowResult::Logits(logits) => sampler.clone().sample(logits).expect("finite logits"),
    }
}

/// Runs `sequences` in a batch with random joins and leaves. Each sequence must generate its expected tokens, which
/// come from a generation without a batch.
fn run(gemma: &Gemma4, kind: CacheKind, mut sequences: Vec<Sequence>, seed: u64, name: &str) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
    let mut waiting: Vec<usize> = (0..sequences.len()).rev().collect();
    let mut running: Vec<usize> = Vec::new();
    while !waiting.is_empty() || !running.is_empty() {
        while !waiting.is_empty() && (running.is_empty() || rng.random_bool(0.4)) {
            let index = waiting.pop().expect("a sequence waits");
            let prompt = sequences[index].prompt.clone();
            let prefill = match rng.random_bool(0.5) {
                true => gemma.prefill(prompt, kind),
                false => Prefill::new(gemma.model(), prompt, kind),
            };
            let mut prefill = prefill.expect("the prompt fits");
            let chunk = rng.random_range(1..40);
            // Announce too few, too many or no sequences. The number must change only the size of the buffers.
            batch.expect(rng.random_range(0..=2 * running.len() + 2));
            let first = loop {
                if let Some(logits) = prefill.advance(chunk).expect("the device works") {
                    break token(&logits.choose(&[RowChoice::Argmax]).expect("one row"));
                }
            };
            assert_eq!(batch.join(&prefill).expect("all is read"), running.len());
            sequences[index].tokens.push(first);
            running.push(index);
        }
        let last = |index: &usize| *sequences[*index].tokens.last().expect("a token");
        let tokens: Vec<u32> = running.iter().map(last).collect();
        // Each row chooses its next token in one of three random ways: from logits on the host, by a sampler, or by
        // argmax. The sampler decodes greedily, so all three ways give the same token.
        let sampler = Sampler::new(&Sampling::greedy());
        let choices: Vec<RowChoice<'_>> = (0..tokens.len())
            .map(|_| match rng.random_range(0..4) {
                0 => RowChoice::Logits,
                1 => RowChoice::Draw(&sampler),
                _ => RowChoice::Argmax,
            })
            .collect();
        // Half of the steps call `follow`, which may start the next step early. If a sequence joins or leaves before
        // the next step, the batch discards the early step.
        let next = match rng.random_bool(0.5) {
            true => batch.follow(&tokens, &choices, rng.random_bool(0.7)),
            false => batch.step(&tokens).and_then(|next| next.choose(&choices)),
        };
        let next = next.expect("the device works");
        for (index, next) in running.iter().zip(next) {
            sequences[*index].tokens.push(drawn(&next, &sampler));
        }
        for row in (0..running.len()).rev() {
            let sequence = &sequences[running[row]];
            if sequence.tokens.len() >= sequence.end {
                batch.leave(row);
                running.swap_remove(row);
            }
        }
        assert_eq!(batch.len(), running.len());
    }
    batch.free_if_empty();
    assert_eq!(batch.bytes(), 0, "an empty batch frees its buffers");
    for (index, sequence) in sequences.iter().enumerate() {
        let expected = &sequence.expected[..sequence.end];
        assert_eq!(
            sequence.tokens[..sequence.end],
            *expected,
            "{name}: sequence {index}"
        );
    }
}

#[test]
fn step_of_a_changing_batch_equals_single_sequences() {
    on_every_device(|fixture, gemma, device| {
        // A software driver compiles kernels for each batch size, which takes minutes per model. Devices that run CubeCL
        // kernels therefore test only one model.
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        // In the first schedule, the batch has ten sequences, but the decode kernels support at most eight. In the
        // second schedule, each prompt nearly fills the 256 cache slots (token positions) that are allocated per
        // sequence. The answers then need more slots. At that time, some allocated rows of the batch have no sequence.
        let kinds = [
            (10, 1..60, false, KvPrecision::Model),
            (6, 250..257, false, KvPrecision::Model),
            (4, 1..60, true, KvPrecision::Model),
            (4, 1..60, false, KvPrecision::Q8),
        ];
        for (seed, (count, lengths, compact_keys, precision)) in (7..).zip(kinds) {
            let kind = CacheKind {
                compact_keys,
                precision,
            };
            if Batch::new(gemma.model(), kind).is_err() {
                continue;
            }
            let options = GenerateOptions {
                compact_keys,
                kv_precision: precision,
                ..greedy(gemma, TOKENS)
            };
            let mut rng = StdRng::seed_from_u64(seed);
            let vocabulary = gemma.config().vocab_size as u32;
            let sequence = |_| {
                let length = rng.random_range(lengths.clone());
                let prompt: Vec<u32> = (0..length)
                    .map(|_| rng.random_range(0..vocabulary))
                    .collect();
                Sequence {
                    expected: alone(gemma, &prompt, &options),
                    prompt,
                    tokens: Vec::new(),
                    end: rng.random_range(2..=TOKENS),
                }
            };
            let sequences = (0..count).map(sequence).collect();
            let name = format!("{} on {}, {kind:?}", fixture.name, device.name);
            run(gemma, kind, sequences, seed, &name);
        }
    });
}

/// Sequences that draw with the same options and different seeds. After some steps, the captured step draws the tokens.
/// One sequence joins before that and one after it. Then one leaves, so that the seeds of the rows change.
#[test]
fn follow_with_samplers_equals_single_sequences() {
    on_every_device(|fixture, gemma, device| {
        if device.is_cube() && fixture.name != "dense-ple" {
            return;
        }
        let kind = CacheKind::default();
        let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
        let sampling = |seed| Sampling {
            temperature: 0.9,
            top_k: Some(20),
            top_p: Some(0.95),
            seed: Some(seed),
            ..Sampling::greedy()
        };
        let mut samplers: Vec<(usize, Sampler)> = Vec::new();
        let mut found: Vec<Vec<u32>> = Vec::new();
        let prompt = |index: usize| fixture.prompt[..fixture.prompt.len() - index].to_vec();
        for step in 0..28 {
            if [0, 3, 14].contains(&step) {
                let index = found.len();
                let mut sampler = Sampler::new(&sampling(7 + index as u64));
                sampler.read(&prompt(index));
                let mut prefill = Prefill::new(gemma.model(), prompt(index), kind).expect("fits");
                let logits = prefill.advance(usize::MAX).expect("the device works");
                let first = logits.expect("all is read");
                let first = first.choose(&[RowChoice::Draw(&sampler)]).expect("one row");
                let first = drawn(&first[0], &sampler);
                sampler.read(&[first]);
                found.push(vec![first]);
                assert_eq!(batch.join(&prefill).expect("all is read"), samplers.len());
                samplers.push((index, sampler));
            }
            if step == 20 {
                batch.leave(0);
                samplers.swap_remove(0);
            }
            let last = |(index, _): &(usize, Sampler)| *found[*index].last().expect("a token");
            let tokens: Vec<u32> = samplers.iter().map(last).collect();
            let choices = samplers.iter().map(|(_, sampler)| RowChoice::Draw(sampler));
            let choices: Vec<RowChoice<'_>> = choices.collect();
            let next = batch.follow(&tokens, &choices, step % 5 != 4);
            for ((index, sampler), next) in samplers.iter_mut().zip(next.expect("finite")) {
                let next = drawn(&next, sampler);
                sampler.read(&[next]);
                found[*index].push(next);
            }
        }
        for (index, found) in found.iter().enumerate() {
            let options = GenerateOptions {
                sampling: sampling(7 + index as u64),
                ..greedy(gemma, found.len())
            };
            let expected = alone(gemma, &prompt(index), &options);
            let case = format!("{} on {}, sequence {index}", fixture.name, device.name);
            assert_eq!(*found, expected, "{case}");
        }
    });
}

#[test]
fn join_of_one_prefill_twice_gives_equal_sequences() {
    on_every_device(|fixture, gemma, _| {
        let kind = CacheKind::default();
        let mut batch = Batch::new(gemma.model(), kind).expect("the format is supported");
        let mut prefill = Prefill::new(gemma.model(), fixture.prompt.clone(), kind).expect("fits");
        let first = prefill.advance(usize::MAX).expect("the device works");
        let first = first.expect("all is read").choose(&[RowChoice::Argmax]);
        let first = token(&first.expect("one row"));
        for row in 0..3 {
            assert_eq!(batch.join(&prefill).expect("all is read"), row);
        }
        let mut tokens = vec![first; 3];
        let mut found = vec![first];
        for _ in 1..TOKENS {
            let next = batch.step(&tokens).expect("the tokens fit");
            let next = next.choose(&[RowChoice::Argmax; 3]).expect("three rows");
            tokens = next.iter().filter_map(RowResult::token).collect();
            assert_eq!(tokens, vec![tokens[0]; 3], "{}", fixture.name);
            found.push(tokens[0]);
        }
        let expected = alone(gemma, &fixture.prompt, &greedy(gemma, TOKENS));
        assert_eq!(found, expected, "{}", fixture.name);
    });
}

#[test]
fn wrong_calls_of_a_batch_are_refused() {
    on_every_device(|fixture, gemma, _| {
        let kind = CacheKind::default();
        let model = gemma.model();
        let mut batch = Batch::new(model, kind).expect("the format is supported");
        let argument = |error: burn_gemma4::Gemma4Error| error.to_string();
        assert!(
            argument(Prefill::new(model, vec![], kind).expect_err("empty")).starts_with("prompt")
        );
        let vocabulary = gemma.config().vocab_size as u32;
        assert!(Prefill::new(model, vec![vocabulary], kind).is_err());
        let mut prefill = Prefill::new(model, fixture.prompt.clone(), kind).expect("fits");
        assert!(argument(batch.join(&prefill).expect_err("unread")).starts_with("prefill"));
        while prefill.advance(4).expect("the device works").is_none() {}
        assert!(argument(prefill.advance(4).expect_err("read")).starts_with("tokens"));
        assert!(argument(batch.step(&[]).expect_err("no sequence")).starts_with("tokens"));
        batch.join(&prefill).expect("all is read");
        assert!(argument(batch.step(&[1, 2]).expect_err("two tokens")).starts_with("tokens"));
        assert!(batch.step(&[vocabulary]).is_err());
        assert_eq!(batch.lengths(), [fixture.prompt.len()]);
    });
}
