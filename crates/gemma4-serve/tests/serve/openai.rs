//! Tests that OpenAI's APIs give the same texts as a direct call of the model.

use crate::harness::{Harness, gemma, user};
use burn_gemma4::{GenerateOptions, Message, Sampling, TokenLogprobs};
use serde_json::{Value, json};
use std::ops::ControlFlow;

fn generated(prompt: &str, options: impl FnOnce(&mut GenerateOptions)) -> burn_gemma4::Generation {
    let gemma = gemma();
    let mut wanted = GenerateOptions {
        sampling: Sampling::greedy(),
        max_tokens: 24,
        ..gemma.chat_options()
    };
    options(&mut wanted);
    let prompt = vec![Message::user(prompt)];
    gemma
        .generate(prompt, &wanted, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds")
}

/// Concatenates the text deltas of a streamed answer.
fn joined(chunks: &[Value], field: &str) -> String {
    let choices = chunks.iter().filter_map(|chunk| chunk["choices"].get(0));
    let texts = choices.filter_map(|choice| choice["delta"][field].as_str());
    texts.collect()
}

#[tokio::test]
async fn chat_equals_the_generation_without_a_server() {
    let harness = Harness::plain();
    let expected = generated("What is a cache?", |_| ());
    let body = json!({"messages": user("What is a cache?"), "temperature": 0, "max_tokens": 24});
    let answer = harness.chat(body.clone()).await.ok();
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], json!(expected.text));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(
        answer["usage"]["prompt_tokens"],
        expected.prompt_tokens.len()
    );
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert!(
        answer["id"]
            .as_str()
            .is_some_and(|id| id.starts_with("chatcmpl-"))
    );

    let mut body = body;
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = harness.chat(body).await.chunks();
    assert_eq!(joined(&chunks, "content"), expected.text);
    let ids: std::collections::HashSet<_> = chunks.iter().map(|chunk| &chunk["id"]).collect();
    assert_eq!(ids.len(), 1, "all chunks have one id");
    let last = chunks.last().expect("chunks");
    assert_eq!(last["usage"]["completion_tokens"], 24);
    assert_eq!(last["choices"], json!([]));
    let reasons = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["finish_reason"].as_str());
    assert_eq!(reasons.collect::<Vec<_>>(), ["length"]);
}

#[tokio::test]
async fn seeds_repeat_answers_and_differ_between_choices() {
    let harness = Harness::plain();
    let body = json!({
        "messages": user("A test"), "temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 7, "n": 3, "max_tokens": 12,
    });
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().expect("choices").iter();
        choices
            .map(|choice| choice["message"]["content"].to_string())
            .collect()
    };
    let first = texts(&harness.chat(body.clone()).await.ok());
    assert_eq!(first, texts(&harness.chat(body).await.ok()));
    assert!(first[0] != first[1] && first[1] != first[2], "{first:?}");
    // The first answer uses the seed of the request. The first answer therefore equals the text that a direct call of
    // the model generates with this seed.
    let expected = generated("A test", |options| {
        options.max_tokens = 12;
        options.sampling = Sampling {
            temperature: 1.0,
            top_p: Some(0.9),
            top_k: Some(50),
            seed: Some(7),
            ..Sampling::greedy()
        };
    });
    assert_eq!(first[0], json!(expected.text).to_string());
}

#[tokio::test]
async fn logprobs_are_natural_logarithms_of_the_models_probabilities() {
    let harness = Harness::plain();
    let expected = generated("Cache", |options| {
        options.max_tokens = 6;
        options.logprobs = Some(3);
    });
    let body = json!({
        "messages": user("Cache"), "temperature": 0, "max_tokens": 6, "logprobs": true, "top_logprobs": 3,
    });
    let answer = harness.chat(body).await.ok();
    let content = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .cloned();
    let content = content.expect("logprobs");
    assert_eq!(content.len(), expected.logprobs.len());
    for (found, TokenLogprobs { logprob, top }) in content.iter().zip(&expected.logprobs) {
        let close = |found: &Value, expected: f32| {
            (found.as_f64().expect("a number") - f64::from(expected)).abs() < 1e-3
        };
        assert!(close(&found["logprob"], *logprob), "{found} {logprob}");
        let found = found["top_logprobs"].as_array().expect("a list");
        assert_eq!(found.len(), 3);
        assert!(
            found
                .iter()
                .zip(top)
                .all(|(found, (_, top))| close(&found["logprob"], *top))
        );
    }
}

#[tokio::test]
async fn stop_strings_end_the_text_before_them() {
    let harness = Harness::plain();
    let whole = generated("The quick", |options| options.max_tokens = 40).text;
    let middle: Vec<char> = whole
        .chars()
        .skip(whole.chars().count() / 2)
        .take(3)
        .collect();
    let stop: String = middle.into_iter().collect();
    let expected = &whole[..whole.find(&stop).expect("the stop string occurs")];
    for stream in [false, true] {
        let body = json!({
            "messages": user("The quick"), "temperature": 0, "max_tokens": 40, "stop": [stop, "never"], "stream": stream,
        });
        let answer = harness.chat(body).await;
        let (text, reason) = match stream {
            false => {
                let choice = answer.ok()["choices"][0].clone();
                let text = choice["message"]["content"]
                    .as_str()
                    .expect("text")
                    .to_owned();
                (text, choice["finish_reason"].clone())
            }
            true => {
                let chunks = answer.chunks();
                let last = chunks.last().expect("chunks")["choices"][0]["finish_reason"].clone();
                (joined(&chunks, "content"), last)
            }
        };
        assert_eq!(text, expected, "{stop:?} of {whole:?}");
        assert_eq!(reason, "stop");
    }
}

#[tokio::test]
async fn logit_bias_and_penalties_change_the_answer() {
    let harness = Harness::plain();
    let token = gemma().tokenizer().encode_text("a").expect("encodes")[0];
    let mut body = json!({"messages": user("x"), "temperature": 0, "max_tokens": 5});
    body["logit_bias"] = json!({token.to_string(): 100});
    let text = |answer: Value| answer["choices"][0]["message"]["content"].clone();
    assert_eq!(text(harness.chat(body.clone()).await.ok()), "aaaaa");
    // The bias of 8 is much smaller than the bias of 100 above. After some repetitions of the token, the frequency and
    // presence penalties therefore outweigh the bias.
    body["logit_bias"] = json!({token.to_string(): 8});
    body["max_tokens"] = json!(30);
    let before = text(harness.chat(body.clone()).await.ok()).to_string();
    body["frequency_penalty"] = json!(2.0);
    body["presence_penalty"] = json!(2.0);
    let after = text(harness.chat(body).await.ok()).to_string();
    let count = |text: &str| text.matches('a').count();
    assert!(count(&after) < count(&before), "{before} {after}");
}

#[tokio::test]
async fn completions_continue_texts_and_tokens() {
    let harness = Harness::plain();
    let gemma = gemma();
    let options = GenerateOptions {
        sampling: Sampling::greedy(),
        max_tokens: 16,
        ..gemma.options()
    };
    let expected = gemma
        .generate("fn main", &options, |_| ControlFlow::Continue(()))
        .expect("the generation succeeds");
    let tokens = &expected.prompt_tokens;
    let text = |answer: &Value, index: usize| answer["choices"][index]["text"].clone();
    for prompt in [
        json!("fn main"),
        json!(tokens),
        json!(["fn main"]),
        json!([tokens]),
    ] {
        let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 16, "logprobs": 1});
        let answer = harness.complete(body).await.ok();
        assert_eq!(text(&answer, 0), json!(expected.text));
        let logprobs = &answer["choices"][0]["logprobs"];
        let names: String = logprobs["tokens"]
            .as_array()
            .expect("a list")
            .iter()
            .filter_map(Value::as_str)
            .collect();
        assert_eq!(names, expected.text);
    }
    let body = json!({"prompt": ["fn main", "# Title", "use "], "temperature": 0, "max_tokens": 8, "n": 2});
    let answer = harness.complete(body).await.ok();
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(6));
    assert_eq!(text(&answer, 0), text(&answer, 1));
    let body = json!({"prompt": "fn main", "temperature": 0, "max_tokens": 16, "stream": true});
    let chunks = harness.complete(body).await.chunks();
    let joined: String = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["text"].as_str())
        .collect();
    assert_eq!(joined, expected.text);
}

#[tokio::test]
async fn models_and_health_are_served() {
    let harness = Harness::plain();
    let models = harness.get("/v1/models").await.ok();
    assert_eq!(models["data"][0]["id"], "tiny");
    assert_eq!(harness.get("/v1/models/tiny").await.ok()["object"], "model");
    assert_eq!(harness.get("/v1/models/other/name").await.status, 404);
    assert_eq!(harness.get("/health").await.ok()["status"], "ok");
    harness
        .chat(json!({"messages": user("x"), "max_tokens": 3}))
        .await
        .ok();
    let metrics = harness.get("/metrics").await.text;
    for name in [
        "gemma4_time_to_first_token_seconds_count 1",
        "gemma4_queued_requests 0",
        "gemma4_generated_tokens_total",
        "gemma4_time_between_tokens_seconds_bucket",
    ] {
        assert!(metrics.contains(name), "{name}: {metrics}");
    }
    harness.wait_for("gemma4_running_answers", 0.0).await;
}
