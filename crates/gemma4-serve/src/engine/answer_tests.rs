//! Tests how an answer separates thoughts, tool calls and text. The answer is cut off after every possible number of tokens.

use super::answer::Answer;
use super::load::{EngineLoad, EventSender};
use super::request::{AnswerOptions, EndReason, Event};
use crate::testing::{answer_options, gemma};
use burn_gemma4::{RowResult, TextKind, Tokenizer};
use std::sync::Arc;
use tokio::sync::mpsc::unbounded_channel;

/// A generated text with a thought, text and two tool calls.
const TEXT: &str = "<|channel>thought\nlet me <see><channel|>The café.<|tool_call>call:now{zone:<|\"|>a, {b}<|\"|>}<tool_call|>\
                    <|tool_call>call:f{}<tool_call|>Done: STOP here<turn|>";

fn tokenizer() -> Tokenizer {
    gemma().tokenizer().clone()
}

/// The thoughts, the text and the tool calls that a client receives, and the reason why the answer ended.
#[derive(Debug, Default, PartialEq)]
struct Received {
    thoughts: String,
    text: String,
    calls: Vec<String>,
    /// The text, with `[call]` in the place of each tool call.
    order: String,
    end: Option<EndReason>,
    tokens: usize,
}

/// Passes `tokens` to an answer until the answer ends, and collects the events.
fn receive(tokenizer: &Tokenizer, tokens: &[u32], options: AnswerOptions) -> Received {
    let (events, mut receiver) = unbounded_channel();
    let events = EventSender::new(events, Arc::<EngineLoad>::default().add(1, 8));
    let mut answer = Answer::new(0, &[2], &Arc::new(options), None, tokenizer, events)
        .expect("the prompt is valid");
    for token in tokens {
        if answer
            .take(RowResult::Token(Some(*token)))
            .expect("the token is valid")
        {
            break;
        }
    }
    let mut received = Received::default();
    while let Ok(event) = receiver.try_recv() {
        assert_eq!(received.end, None, "no event follows the end");
        match event {
            Event::Text {
                kind: TextKind::Thought,
                text,
                ..
            } => received.thoughts += &text,
            Event::Text { text, .. } => {
                received.text += &text;
                received.order += &text;
            }
            Event::ToolCall { text, .. } => {
                received.calls.push(text);
                received.order += "[call]";
            }
            Event::End { reason, usage, .. } => {
                received.end = Some(reason);
                received.tokens = usage.tokens;
            }
            Event::Failed(error) => panic!("{error}"),
        }
    }
    received
}

#[test]
fn parts_are_told_apart_wherever_the_answer_ends() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode(TEXT).expect("the text encodes");
    let stop = tokenizer.id("<turn|>").expect("the token exists");
    let options = |max_tokens| AnswerOptions {
        max_tokens,
        stop_tokens: vec![stop],
        ..answer_options()
    };
    let whole = receive(&tokenizer, &tokens, options(1000));
    assert_eq!(whole.thoughts, "let me <see>");
    assert_eq!(whole.text, "The café.Done: STOP here");
    assert_eq!(
        whole.calls,
        ["call:now{zone:<|\"|>a, {b}<|\"|>}", "call:f{}"]
    );
    assert_eq!(whole.end, Some(EndReason::Stop));
    assert_eq!(whole.tokens, tokens.len());
    for end in 1..tokens.len() {
        let found = receive(&tokenizer, &tokens, options(end));
        assert_eq!(found.end, Some(EndReason::Length));
        assert_eq!(found.tokens, end);
        assert!(whole.thoughts.starts_with(&found.thoughts), "{found:?}");
        let text = found.text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        assert!(whole.text.starts_with(text), "{found:?}");
        // Only the last tool call may be incomplete.
        for (index, call) in found.calls.iter().enumerate() {
            let expected = &whole.calls[index];
            match index + 1 < found.calls.len() {
                true => assert_eq!(call, expected),
                false => assert!(expected.starts_with(call), "{found:?}"),
            }
        }
    }
}

#[test]
fn stop_strings_hold_in_the_text_only() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode(TEXT).expect("the text encodes");
    let with = |stop: &str| {
        let options = AnswerOptions {
            max_tokens: 1000,
            stop_strings: vec![stop.into()],
            ..answer_options()
        };
        receive(&tokenizer, &tokens, options)
    };
    let found = with("STOP");
    assert_eq!(found.text, "The café.Done: ");
    assert_eq!(found.end, Some(EndReason::StopString("STOP".into())));
    // These stop strings occur in thoughts and tool calls, but not in the text, so the answer does not end early.
    for string in ["let me", "zone"] {
        assert_eq!(with(string).text, "The café.Done: STOP here");
    }
    assert_eq!(with("é").text, "The caf");
}

#[test]
fn text_that_may_begin_a_stop_string_stays_before_the_tool_call() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode(TEXT).expect("the text encodes");
    // The stop string `é.Done` would end the answer only if a stop string could span the tool calls.
    for stop in ["é.Done", "café.X", "."] {
        let options = AnswerOptions {
            max_tokens: 1000,
            stop_strings: vec![stop.into()],
            ..answer_options()
        };
        let found = receive(&tokenizer, &tokens, options);
        let expected = match stop {
            "." => "The café",
            _ => "The café.[call][call]Done: STOP here",
        };
        assert_eq!(found.order, expected, "{stop}");
    }
}

#[test]
fn channel_with_the_beginning_of_the_name_is_a_thought() {
    let tokenizer = tokenizer();
    let encode = |text: &str| tokenizer.encode(text).expect("the text encodes");
    let tokens = encode("<|channel>tho<channel|>x");
    let options = |max_tokens| AnswerOptions {
        max_tokens,
        ..answer_options()
    };
    let found = receive(&tokenizer, &tokens, options(tokens.len()));
    assert_eq!((&*found.thoughts, &*found.text), ("tho", "x"));
    let cut = encode("<|channel>tho").len();
    let found = receive(&tokenizer, &tokens, options(cut));
    assert_eq!((&*found.thoughts, &*found.text), ("", ""));
}

#[test]
fn single_tool_call_ends_the_answer() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode(TEXT).expect("the text encodes");
    let options = AnswerOptions {
        max_tokens: 1000,
        single_tool_call: true,
        ..answer_options()
    };
    let found = receive(&tokenizer, &tokens, options);
    assert_eq!((found.calls.len(), found.end), (1, Some(EndReason::Stop)));
}

#[test]
fn thought_ends_at_its_largest_number_of_tokens() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode(TEXT).expect("the text encodes");
    let options = AnswerOptions {
        max_tokens: 1000,
        max_thinking_tokens: Some(2),
        ..answer_options()
    };
    let found = receive(&tokenizer, &tokens[..8], options);
    assert!(found.thoughts.len() < "let me <see>".len(), "{found:?}");
    assert!(
        !found.text.is_empty(),
        "the answer follows the thought: {found:?}"
    );
}

#[test]
fn plain_answers_keep_all_text() {
    let tokenizer = tokenizer();
    let tokens = tokenizer.encode(TEXT).expect("the text encodes");
    let options = AnswerOptions {
        max_tokens: tokens.len(),
        has_parts: false,
        ..answer_options()
    };
    let found = receive(&tokenizer, &tokens, options);
    let expected = tokenizer.decode(&tokens, true).expect("the tokens decode");
    assert_eq!(found.text, expected);
}
