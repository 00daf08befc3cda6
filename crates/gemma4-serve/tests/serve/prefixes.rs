//! Tests the prefix cache. If a request is sent twice, the second answer reuses the keys and values of all prompt
//! tokens except the last. Each API must report the number of reused tokens in its own usage fields.

use crate::harness::{Harness, user, with_model};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use serde_json::{Value, json};

const TEXT: &str =
    "Name a few rivers of Europe that flow into the North Sea, and say how long they are.";

/// Sends a request twice, and checks that both answers have the same text. Returns the `usage` object of each answer.
async fn usages(harness: &Harness, path: &str, body: Value) -> [Value; 2] {
    let mut answers = Vec::new();
    for _ in 0..2 {
        let mut answer = harness.post(path, &with_model(body.clone())).await.ok();
        let usage = answer["usage"].take();
        for name in ["id", "created", "created_at"] {
            answer[name].take();
        }
        if let Some(items) = answer["output"].as_array_mut() {
            items.iter_mut().for_each(|item| drop(item["id"].take()));
        }
        answers.push((answer, usage));
    }
    assert_eq!(answers[0].0, answers[1].0, "{path}");
    [answers[0].1.clone(), answers[1].1.clone()]
}

#[tokio::test]
async fn usage_of_a_repeated_request_counts_the_reused_tokens() {
    let messages = || user(TEXT);
    for (path, body, [input, details, cached]) in [
        (
            "/v1/chat/completions",
            json!({"messages": messages(), "n": 2, "max_tokens": 5, "temperature": 0}),
            ["prompt_tokens", "prompt_tokens_details", "cached_tokens"],
        ),
        (
            "/v1/completions",
            json!({"prompt": TEXT, "max_tokens": 5, "temperature": 0}),
            ["prompt_tokens", "prompt_tokens_details", "cached_tokens"],
        ),
        (
            "/v1/responses",
            json!({"input": TEXT, "max_output_tokens": 5, "temperature": 0}),
            ["input_tokens", "input_tokens_details", "cached_tokens"],
        ),
    ] {
        let harness = Harness::plain();
        let [first, second] = usages(&harness, path, body).await;
        assert_eq!(first[details][cached], 0, "{path}: {first}");
        assert_eq!(second[input], first[input], "{path}");
        let all_but_last = first[input].as_u64().expect("a number") - 1;
        assert_eq!(second[details][cached], all_but_last, "{path}: {second}");
        assert_eq!(
            harness.metric("gemma4_cached_prompt_tokens_total").await,
            all_but_last as f64
        );
        assert!(harness.metric("gemma4_prefix_cache_bytes").await > 0.0);
    }
}

#[tokio::test]
async fn usage_of_a_repeated_message_excludes_the_reused_tokens_from_the_input() {
    let harness = Harness::plain();
    let body = json!({"messages": user(TEXT), "max_tokens": 5, "temperature": 0});
    let [first, second] = usages(&harness, "/v1/messages", body).await;
    assert_eq!(first["cache_read_input_tokens"], 0);
    assert_eq!(second["input_tokens"], 1, "{second}");
    let all = first["input_tokens"].as_u64().expect("a number");
    assert_eq!(second["cache_read_input_tokens"], all - 1, "{second}");
}

#[tokio::test]
async fn prefix_cache_of_0_bytes_reuses_nothing() {
    let engine = EngineOptions {
        prefix_cache_bytes: 0,
        ..EngineOptions::default()
    };
    let harness = Harness::new(engine, ServerOptions::default());
    let body = json!({"prompt": TEXT, "max_tokens": 5, "temperature": 0});
    let [_, second] = usages(&harness, "/v1/completions", body).await;
    assert_eq!(second["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(harness.metric("gemma4_prefix_cache_bytes").await, 0.0);
}
