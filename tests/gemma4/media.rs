//! What the tests of prompts with images and of prompts with audio share.

use crate::devices::devices;
use crate::fixture::{Fixture, greedy};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Batch, ChatOptions, Gemma4, GenerateOptions, Generation, Message, Prefill, Prompt, RowChoice,
    RowResult,
};
use std::ops::ControlFlow;

/// Calls `test` once for each of the fixtures on every device, with the model in f32.
pub fn on_every_device(fixtures: &[&'static str], test: impl Fn(&Fixture, &Gemma4, &str)) {
    for device in devices() {
        for name in fixtures {
            let fixture = Fixture::open(name);
            let gemma = fixture.load(&device.device, DType::F32);
            test(&fixture, &gemma, &format!("{name} {}", device.name));
        }
    }
}

/// Calls `test` once for each of the fixtures on the CPU.
pub fn on_cpu(fixtures: &[&'static str], test: impl Fn(&Fixture, &Gemma4)) {
    for name in fixtures {
        let fixture = Fixture::open(name);
        let gemma = fixture.load(&Device::flex(), DType::F32);
        test(&fixture, &gemma);
    }
}

pub fn generated(gemma: &Gemma4, prompt: Vec<Message>, options: &GenerateOptions) -> Generation {
    gemma
        .generate(prompt, options, |_| ControlFlow::Continue(()))
        .expect("the prompt is valid")
}

/// Checks that each conversation of a batch gets the answer that it gets alone.
pub fn check_batch<const N: usize>(gemma: &Gemma4, conversations: [Vec<Message>; N], what: &str) {
    let options = greedy(gemma, 5);
    let prompts = conversations.clone().map(Prompt::Chat);
    let batch = gemma
        .generate_batch(&prompts, &options)
        .expect("the prompts are valid");
    for (found, prompt) in batch.iter().zip(conversations) {
        let expected = generated(gemma, prompt, &options);
        assert_eq!(found.tokens, expected.tokens, "{what}");
    }
}

/// Returns the error of a prompt that is refused.
pub fn refused(gemma: &Gemma4, prompt: impl Into<Prompt>, chat: ChatOptions) -> String {
    let options = GenerateOptions {
        chat,
        ..greedy(gemma, 1)
    };
    let outcome = gemma.generate(prompt, &options, |_| ControlFlow::Continue(()));
    outcome.expect_err("the prompt is refused").to_string()
}

/// Replaces the tokens of each image and each audio clip in a prompt by one placeholder.
pub fn collapsed(gemma: &Gemma4, prompt: &[u32]) -> Vec<u32> {
    let ids = |names: &[&str]| -> Vec<u32> {
        let ids = names.iter().filter_map(|name| gemma.tokenizer().id(name));
        ids.collect()
    };
    let around = ids(&["<|image>", "<image|>", "<|audio>", "<audio|>"]);
    let placeholders = ids(&["<|image|>", "<|audio|>"]);
    let outside = prompt
        .iter()
        .copied()
        .filter(|token| !around.contains(token));
    let mut collapsed: Vec<u32> = outside.collect();
    collapsed.dedup_by(|one, other| one == other && placeholders.contains(one));
    collapsed
}

/// Reads a prompt, and returns its first token. No call but the last returns logits.
pub fn first_token(prefill: &mut Prefill, chunk: usize) -> u32 {
    loop {
        let before = prefill.remaining();
        let logits = prefill.advance(chunk).expect("the device works");
        if let Some(logits) = logits {
            let chosen = logits.choose(&[RowChoice::Argmax]).expect("one row");
            return chosen[0].token().expect("the logits are finite");
        }
        assert!(prefill.remaining() > 0 && prefill.remaining() <= before);
    }
}

/// Decodes the answers of all sequences of a batch.
pub fn decoded(batch: &mut Batch, first: Vec<u32>, count: usize) -> Vec<Vec<u32>> {
    let mut answers: Vec<Vec<u32>> = first.into_iter().map(|token| vec![token]).collect();
    for _ in 1..count {
        let last: Vec<u32> = answers
            .iter()
            .map(|answer| answer[answer.len() - 1])
            .collect();
        let choices = vec![RowChoice::Argmax; last.len()];
        let next = batch.step(&last).expect("the tokens fit").choose(&choices);
        let next = next.expect("the logits are finite");
        let next = next.iter().filter_map(RowResult::token);
        answers
            .iter_mut()
            .zip(next)
            .for_each(|(answer, token)| answer.push(token));
    }
    answers
}
