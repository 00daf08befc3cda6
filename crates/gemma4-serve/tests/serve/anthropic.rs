//! Tests Anthropic's Messages API.

use crate::harness::{Harness, gemma, user};
use burn_gemma4::{GenerateOptions, Message, Sampling};
use serde_json::{Value, json};
use std::ops::ControlFlow;

fn expected(messages: Vec<Message>, max_tokens: usize) -> burn_gemma4::Generation {
    let gemma = gemma();
    let options = GenerateOptions {
        sampling: Sampling::greedy(),
        max_tokens,
        ..gemma.chat_options()
    };
    gemma
        .generate(messages, &options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
}

#[tokio::test]
async fn message_equals_the_generation_without_a_server() {
    let harness = Harness::plain();
    let expected = expected(
        vec![Message::system("Be brief."), Message::user("Hello")],
        20,
    );
    let body = json!({
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "max_tokens": 20, "temperature": 0,
    });
    let answer = harness.messages(body.clone()).await.ok();
    assert_eq!(
        answer["content"],
        json!([{"type": "text", "text": expected.text}])
    );
    assert_eq!(answer["stop_reason"], "max_tokens");
    assert_eq!(
        answer["usage"]["input_tokens"],
        expected.prompt_tokens.len()
    );
    assert_eq!(answer["usage"]["output_tokens"], 20);
    let mut count = body.clone();
    count["model"] = json!("tiny");
    let count = harness.post("/v1/messages/count_tokens", &count).await.ok();
    assert_eq!(count["input_tokens"], expected.prompt_tokens.len());

    let mut body = body;
    body["stream"] = json!(true);
    let messages = harness.messages(body).await.messages();
    let names: Vec<&str> = messages
        .iter()
        .filter_map(|(name, _)| name.as_deref())
        .collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(
        names[names.len() - 3..],
        ["content_block_stop", "message_delta", "message_stop"]
    );
    let mut text = String::new();
    for (name, data) in &messages {
        let data: Value = serde_json::from_str(data).expect("JSON");
        assert_eq!(data["type"].as_str(), name.as_deref());
        text += data["delta"]["text"].as_str().unwrap_or_default();
    }
    assert_eq!(text, expected.text);
}

#[tokio::test]
async fn stop_sequence_is_reported() {
    let harness = Harness::plain();
    let whole = expected(vec![Message::user("Hello")], 30).text;
    let stop: String = whole.chars().skip(4).take(3).collect();
    let body = json!({
        "messages": user("Hello"), "max_tokens": 30, "temperature": 0, "stop_sequences": [stop],
    });
    let answer = harness.messages(body).await.ok();
    assert_eq!(answer["stop_reason"], "stop_sequence");
    assert_eq!(answer["stop_sequence"], json!(stop));
    let before = &whole[..whole.find(&stop).expect("the stop string occurs")];
    let text = answer["content"][0]["text"].as_str().unwrap_or_default();
    assert_eq!(text, before);
}

#[tokio::test]
async fn output_format_is_followed() {
    let harness = Harness::plain();
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": false});
    let body = json!({
        "messages": user("x"), "max_tokens": 100, "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    });
    let answer = harness.messages(body).await.ok();
    let text = answer["content"][0]["text"].as_str().expect("text");
    let value: Value = serde_json::from_str(text).expect("JSON");
    assert!(value["n"] == 1 || value["n"] == 2, "{value}");
}
