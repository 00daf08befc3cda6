//! Tests how texts end, and whether each piece of a text counts as answer, thought or tool call. The tests cover stop
//! strings that begin or end inside tokens, and cancellation during the prefill.

use crate::fixture::{Fixture, greedy};
use crate::programs::folder::{Folder, WRITING, written};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Cancellation, FinishReason, Gemma4, GenerateOptions, Generation, LoadOptions, TextKind,
};
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

fn writer(chain: &[u32]) -> Gemma4 {
    let folder = Folder::that_writes(chain);
    Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new())
        .expect("the checkpoint is valid")
}

fn generate(gemma: &Gemma4, prompt: &[u32], options: &GenerateOptions) -> Generation {
    gemma
        .generate(prompt.to_vec(), options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
}

const X: u32 = 304;
const BYTE: u32 = 24;
/// The tokens that the model writes one after the other: `x`, `the cat`, the bytes of `É!`, a special token, and `hand`.
const CHAIN: [u32; 12] = [
    X,
    315,
    280,
    283,
    281,
    300,
    BYTE + 0xC3,
    BYTE + 0x89,
    BYTE + 0x21,
    15,
    288,
    319,
];

fn until(strings: &[&str]) -> Generation {
    let gemma = writer(&CHAIN);
    let options = GenerateOptions {
        stop_strings: strings.iter().map(ToString::to_string).collect(),
        ..greedy(&gemma, CHAIN.len() - 1)
    };
    generate(&gemma, &[2, X], &options)
}

#[test]
fn stop_string_ends_the_text() {
    let whole = until(&[]);
    assert_eq!(whole.tokens, CHAIN[1..]);
    assert_eq!(whole.text, "the catÉ!hand");
    assert_eq!(whole.finish_reason, FinishReason::Length);
    for (strings, count) in [
        // The stop string lies inside a token. The generated text keeps the whole token.
        (&["h"][..], 1),
        (&["e c"], 3),
        (&["the cat"], 5),
        // A stop string of one character matches as soon as the last byte of the character is generated.
        (&["É"], 7),
        (&["tÉ"], 7),
        (&["!"], 8),
        // A stop string may be the name of a special token.
        (&["<|think|>"], 9),
        (&["!<|think|>ha"], 11),
        (&["dog", "cat", "and"], 5),
        (&["handy", "x"], 11),
    ] {
        let found = until(strings);
        assert_eq!(found.tokens, CHAIN[1..=count], "{strings:?}");
        let ended = match count == 11 && strings[0] == "handy" {
            true => FinishReason::Length,
            false => FinishReason::Stop,
        };
        assert_eq!(found.finish_reason, ended, "{strings:?}");
        assert!(whole.text.starts_with(&found.text), "{strings:?}");
    }
    // The stop string is the replacement character, which often stands for an incomplete UTF-8 character. The first byte of
    // `É` alone must not match this stop string.
    assert_eq!(until(&["\u{FFFD}"]).finish_reason, FinishReason::Length);
    assert_eq!(until(&["cat"]).text, "the cat");
    assert_eq!(until(&["É"]).text, "the catÉ");
}

/// A stop string in the prompt has no effect, because only generated text is compared with the stop strings.
#[test]
fn stop_string_in_the_prompt_is_ignored() {
    let gemma = writer(&CHAIN);
    let options = GenerateOptions {
        stop_strings: vec!["x".into(), "xt".into()],
        ..greedy(&gemma, 3)
    };
    let generation = generate(&gemma, &[2, X], &options);
    assert_eq!(generation.tokens, CHAIN[1..4]);
}

#[test]
fn stop_string_that_is_empty_is_refused() {
    let gemma = writer(&CHAIN);
    let options = GenerateOptions {
        stop_strings: vec!["a".into(), String::new()],
        ..greedy(&gemma, 3)
    };
    let error = gemma
        .generate(vec![2, X], &options, |_| ControlFlow::Continue(()))
        .expect_err("an empty stop string is refused");
    assert!(error.to_string().contains("stop_strings"), "{error}");
}

#[test]
fn generation_separates_answer_thoughts_and_tool_calls() {
    let gemma = writer(&WRITING);
    let mut pieces: Vec<(TextKind, String)> = Vec::new();
    let generation = gemma
        .generate(vec![2, WRITING[0]], &gemma.options(), |token| {
            match pieces.last_mut() {
                Some((kind, text)) if *kind == token.kind => *text += token.text,
                _ => pieces.push((token.kind, token.text.to_owned())),
            }
            ControlFlow::Continue(())
        })
        .expect("the generation succeeds");
    assert_eq!(generation.tokens, WRITING[1..]);
    assert_eq!(generation.finish_reason, FinishReason::Stop);
    assert_eq!(generation.text, written::ANSWER);
    assert_eq!(generation.thoughts, written::THOUGHTS);
    assert_eq!(generation.tool_calls, [written::TOOL_CALL]);
    let of_kind = |kind| -> String {
        let of_kind = pieces.iter().filter(|(one, _)| *one == kind);
        of_kind.map(|(_, text)| text.as_str()).collect()
    };
    assert_eq!(of_kind(TextKind::Answer), written::ANSWER);
    assert_eq!(of_kind(TextKind::Thought), written::THOUGHTS);
    assert_eq!(of_kind(TextKind::ToolCall), written::TOOL_CALL);
}

/// If a prompt ends inside a thought, the generated text continues this thought.
#[test]
fn generation_continues_a_thought_of_the_prompt() {
    const CHANNEL: u32 = 13;
    let gemma = writer(&[X, 281, 14, 282, 12]);
    let thought: Vec<u32> = gemma
        .tokenizer()
        .encode("thought\n")
        .expect("the text encodes");
    for header in [vec![], thought] {
        let prompt = [&[2, CHANNEL][..], &header, &[X]].concat();
        let generation = generate(&gemma, &prompt, &gemma.options());
        assert_eq!(generation.text, "b", "{prompt:?}");
        assert!(generation.thoughts.ends_with('a'), "{generation:?}");
    }
    let closed = [2, CHANNEL, 281, 14, X];
    assert_eq!(generate(&gemma, &closed, &gemma.options()).text, "ab");
}

#[test]
fn cancelled_generation_reads_no_token() {
    let fixture = Fixture::open("dense-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let cancellation = Cancellation::new();
    let options = GenerateOptions {
        cancellation: Some(cancellation.clone()),
        ..greedy(&gemma, 4)
    };
    let mut session = gemma.session();
    let mut generate = || {
        session
            .generate(fixture.prompt.clone(), &options, |_| {
                ControlFlow::Continue(())
            })
            .expect("the generation succeeds")
    };
    cancellation.cancel();
    let generation = generate();
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert!(generation.tokens.is_empty());
    assert_eq!(generation.timings.prefill_tokens, 0);
    cancellation.reset();
    assert_eq!(generate().tokens, fixture.generated[..4]);
}

#[test]
fn cancelled_prefill_stops_early_and_continues_later() {
    let folder = Folder::copy("dense-ple");
    folder.set("config.json", "max_position_embeddings", 1 << 20);
    let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new())
        .expect("the checkpoint loads");
    let cancellation = Cancellation::new();
    let options = GenerateOptions {
        cancellation: Some(cancellation.clone()),
        ..greedy(&gemma, 4)
    };
    let prompt = vec![50; 500_000];
    let mut session = gemma.session();
    let start = Instant::now();
    thread::spawn(move || {
        thread::sleep(Duration::from_secs(2));
        cancellation.cancel();
    });
    let generation = session
        .generate(prompt.clone(), &options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds");
    assert!(
        start.elapsed() < Duration::from_secs(60),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert!(generation.tokens.is_empty());
    let read = generation.timings.prefill_tokens;
    assert!(read < prompt.len() && read == session.len(), "{read}");

    // After the cancellation, the session continues from the tokens that it has prefilled.
    let options = GenerateOptions {
        cancellation: None,
        ..options
    };
    let longer = &prompt[..read + 3];
    let generation = session
        .generate(longer.to_vec(), &options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds");
    assert_eq!(generation.timings.prefill_tokens, 3);
    assert_eq!(generation.tokens.len(), 4);
}
