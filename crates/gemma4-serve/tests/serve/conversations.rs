//! Conversations with images and audio for tests, with the answers that `Gemma4::generate` gives.

use crate::harness::{Harness, with_model};
use crate::pictures::{image_url, input_audio, model, text};
use burn_gemma4::{Audio, Gemma4, GenerateOptions, Image, Message, MessagePart, Sampling};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use serde_json::{Value, json};
use std::ops::ControlFlow;

/// The largest number of tokens of an answer.
pub const TOKENS: usize = 12;

/// A conversation in the form of chat completions, with the greedy answer that `Gemma4::generate` gives.
pub struct Case {
    pub messages: Value,
    pub answer: String,
    pub prompt_tokens: usize,
}

/// Starts a server of a fixture.
pub fn harness(name: &str, engine: EngineOptions) -> Harness {
    Harness::of_models(vec![model(name)], engine, ServerOptions::default(), None)
}

/// Returns a part for `Gemma4::generate`, and the same part for a request.
fn part(value: &Value, files: &[Vec<u8>]) -> (MessagePart, Value) {
    let file = |index: &Value| &files[index.as_u64().expect("an index") as usize];
    if let Some(index) = value.get("image") {
        let image = Image::from_bytes(file(index)).expect("the image is decodable");
        return (MessagePart::Image(image), image_url(file(index)));
    }
    if let Some(index) = value.get("audio") {
        let audio = Audio::from_bytes(file(index)).expect("the clip is decodable");
        return (MessagePart::Audio(audio), input_audio(file(index)));
    }
    let words = value["text"].as_str().expect("a text");
    (words.into(), text(words))
}

/// Creates a case from messages of the user and the model in turn. A part `{"image": 1}` is the second file, and so is
/// a part `{"audio": 1}`.
pub fn case(gemma: &Gemma4, turns: &[Value], files: &[Vec<u8>]) -> Case {
    let (mut own, mut sent) = (Vec::new(), Vec::new());
    for (index, turn) in turns.iter().enumerate() {
        let parts = turn.as_array().expect("parts").iter();
        let (shown, content): (Vec<MessagePart>, Vec<Value>) =
            parts.map(|one| part(one, files)).unzip();
        match index % 2 {
            0 => own.push(Message::user(shown)),
            _ => own.push(Message::assistant(shown)),
        }
        let role = ["user", "assistant"][index % 2];
        sent.push(json!({"role": role, "content": content}));
    }
    let options = GenerateOptions {
        max_tokens: TOKENS,
        sampling: Sampling::greedy(),
        ..gemma.chat_options()
    };
    let generation = gemma
        .generate(own, &options, |_| ControlFlow::Continue(()))
        .expect("the prompt is valid");
    Case {
        messages: sent.into(),
        answer: generation.text,
        prompt_tokens: generation.prompt_tokens.len(),
    }
}

/// Returns the request of a case.
pub fn body(case: &Case) -> Value {
    with_model(json!({"messages": case.messages, "max_tokens": TOKENS, "temperature": 0}))
}

/// Sends a case, and checks its answer. Returns the number of cached tokens.
pub async fn check(harness: &Harness, case: &Case, what: &str) -> usize {
    let answer = harness.post("/v1/chat/completions", &body(case)).await.ok();
    let content = answer["choices"][0]["message"]["content"].as_str();
    assert_eq!(content.unwrap_or_default(), case.answer, "{what}");
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], case.prompt_tokens, "{what}");
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    cached.as_u64().expect("a number") as usize
}
