//! Tests a server with two engines, as for two devices: which engine a request goes to, adapters, limits and the drain.

use crate::adapters::{adapters, alone, answer, load, merged, unload, with_root};
use crate::harness::{Harness, MODEL, gemma, user};
use crate::socket::{Listening, exchange, get, post};
use burn::tensor::DType;
use burn_gemma4::{AdapterTargets, Gemma4, LoadOptions};
use gemma4_serve::engine::{EngineOptions, EnginePool};
use gemma4_serve::{ErrorKind, RequestError, ServerOptions};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::task::{JoinHandle, spawn_blocking};

const TOKENS: usize = 24;

/// Returns a server with two engines with the given options.
fn two(engine: EngineOptions) -> Harness {
    Harness::with_engines(2, engine, ServerOptions::default())
}

/// Returns the number of requests that an engine has got for a reason.
async fn routed(harness: &Harness, device: usize, reason: &str) -> f64 {
    let labels = format!("device=\"flex:{device}\",reason=\"{reason}\"");
    let name = format!("gemma4_routed_requests_total{{{labels}}}");
    harness.metric(&name).await
}

/// Returns the number of requests that an engine has got.
async fn all_routed(harness: &Harness, device: usize) -> f64 {
    routed(harness, device, "load").await + routed(harness, device, "prefix").await
}

/// Sends a completion request, and returns the text and the number of reused prompt tokens.
async fn complete(harness: &Harness, prompt: &[u32], tokens: usize) -> (String, u64) {
    let body = json!({
        "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
    });
    let answer = harness.complete(body).await.ok();
    let text = answer["choices"][0]["text"].as_str().expect("a text");
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (text.to_owned(), cached.as_u64().expect("a number"))
}

/// Returns a prompt of `tokens` tokens, which depends on `seed`.
fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens)
        .map(|index| 100 + (seed * 7919 + index * 31) % 1800)
        .collect()
}

#[tokio::test]
async fn turns_of_a_conversation_stay_on_the_engine_with_their_prefix() {
    let harness = two(EngineOptions::default());
    let conversations = [prompt(1, 120), prompt(2, 120)];
    for turn in 0..4 {
        for conversation in &conversations {
            let (_, cached) = complete(&harness, &conversation[..48 + turn * 24], 2).await;
            let before = (48 + turn * 24) as u64 - 24;
            // The engine reuses all tokens of the turn before.
            assert_eq!(cached, if turn == 0 { 0 } else { before }, "turn {turn}");
        }
    }
    for device in 0..2 {
        assert_eq!(routed(&harness, device, "load").await, 1.0);
        assert_eq!(routed(&harness, device, "prefix").await, 3.0);
        let cached = format!("gemma4_cached_prompt_tokens_total{{device=\"flex:{device}\"}}");
        assert_eq!(harness.metric(&cached).await, (48 + 72 + 96) as f64);
    }
}

/// Sends 64 prompts at once, and checks that each engine answers about half of them, as the model alone would.
async fn check_balance(prompts: Vec<Vec<u32>>) {
    let harness = Arc::new(two(EngineOptions::default()));
    let tasks = prompts.iter().cloned().map(|prompt| {
        let harness = harness.clone();
        tokio::spawn(async move { complete(&harness, &prompt, 12).await.0 })
    });
    let tasks: Vec<_> = tasks.collect();
    let mut texts = Vec::new();
    for task in tasks {
        texts.push(task.await.expect("the answer is complete"));
    }
    let counts = [all_routed(&harness, 0).await, all_routed(&harness, 1).await];
    assert_eq!(counts[0] + counts[1], 64.0);
    assert!(counts.iter().all(|count| *count >= 16.0), "{counts:?}");
    for (prompt, text) in prompts.iter().zip(&texts) {
        assert_eq!(complete(&harness, prompt, 12).await.0, *text);
    }
}

#[tokio::test]
async fn requests_at_once_are_spread_over_the_engines() {
    check_balance((0..64).map(|seed| prompt(seed, 40)).collect()).await;
}

#[tokio::test]
async fn requests_at_once_with_one_shared_prefix_are_spread_over_the_engines() {
    let shared = prompt(1, 64);
    let prompts = (0..64).map(|seed| [&shared[..], &prompt(100 + seed, 8)].concat());
    check_balance(prompts.collect()).await;
}

#[tokio::test]
async fn short_shared_prefix_does_not_gather_requests_on_one_engine() {
    let harness = Arc::new(two(EngineOptions::default()));
    let shared = prompt(1, 16);
    // One engine has kept the prefix before the others arrive.
    complete(&harness, &[&shared[..], &prompt(2, 8)].concat(), 2).await;
    let tasks = (0..8).map(|seed| {
        let harness = harness.clone();
        let prompt = [&shared[..], &prompt(100 + seed, 8)].concat();
        tokio::spawn(async move { complete(&harness, &prompt, 100).await })
    });
    let tasks: Vec<_> = tasks.collect();
    for task in tasks {
        task.await.expect("the answer is complete");
    }
    let counts = [all_routed(&harness, 0).await, all_routed(&harness, 1).await];
    assert!(counts.iter().all(|count| *count >= 3.0), "{counts:?}");
}

#[tokio::test]
async fn prefixes_attract_no_requests_without_a_prefix_cache() {
    let harness = two(EngineOptions {
        prefix_cache_bytes: 0,
        ..EngineOptions::default()
    });
    let conversation = prompt(1, 120);
    for turn in 0..4 {
        let (_, cached) = complete(&harness, &conversation[..48 + turn * 24], 2).await;
        assert_eq!(cached, 0);
    }
    for device in 0..2 {
        assert_eq!(routed(&harness, device, "load").await, 2.0);
        assert_eq!(routed(&harness, device, "prefix").await, 0.0);
    }
}

/// Sends a completion request for `n` answers of `tokens` tokens, in a task of its own.
fn spawn_answers(harness: &Arc<Harness>, seed: u32, n: usize, tokens: usize) -> JoinHandle<u16> {
    let harness = harness.clone();
    let body = json!({
        "prompt": prompt(seed, 20), "n": n, "max_tokens": tokens, "temperature": 1, "ignore_eos": true,
    });
    tokio::spawn(async move { harness.complete(body).await.status.as_u16() })
}

#[tokio::test]
async fn full_queue_of_the_less_busy_engine_sends_requests_to_the_other() {
    let harness = Arc::new(two(EngineOptions {
        max_running: 4,
        max_queue: 1,
        kv_tokens: Some(8192),
        ..EngineOptions::default()
    }));
    let gauge = |name: &str, device: usize| format!("gemma4_{name}{{device=\"flex:{device}\"}}");
    // The first engine has one answer, which takes so much of the KV cache that no second answer fits.
    let one = spawn_answers(&harness, 1, 1, 6000);
    harness.wait_for(&gauge("running_answers", 0), 1.0).await;
    let four = spawn_answers(&harness, 2, 4, 1500);
    harness.wait_for(&gauge("running_answers", 1), 4.0).await;
    // Both engines are full. The first one has fewer answers, so a request enters its queue.
    let queued = spawn_answers(&harness, 3, 1, 10);
    harness.wait_for(&gauge("queued_requests", 0), 1.0).await;
    // The first engine still has fewer answers, but its queue is full.
    let other = spawn_answers(&harness, 4, 1, 10);
    harness.wait_for(&gauge("queued_requests", 1), 1.0).await;
    let refused = spawn_answers(&harness, 5, 1, 10);
    assert_eq!(refused.await.expect("the task ends"), 429);
    one.abort();
    four.abort();
    assert_eq!(queued.await.expect("the answer is complete"), 200);
    assert_eq!(other.await.expect("the answer is complete"), 200);
    let counts = [all_routed(&harness, 0).await, all_routed(&harness, 1).await];
    assert_eq!(counts, [2.0, 2.0]);
}

#[tokio::test]
async fn adapters_are_loaded_on_both_engines_and_freed_on_both() {
    let root = adapters([("one", 2, 1), ("two", 3, 2)]);
    let harness = Arc::new(with_root(&root, 1, 2));
    let [one, two] = ["one", "two"].map(|name| merged(&root.path().join(name), TOKENS));
    let base = alone(&gemma(), TOKENS);
    assert_eq!(load(&harness, "mine", "one").await.0, 200);
    // Concurrent requests go to both engines, although their prompts are equal.
    let tasks = (0..40).map(|number| {
        let harness = harness.clone();
        tokio::spawn(async move {
            let model = [MODEL, "tiny:mine"][number % 2];
            answer(&harness, model, TOKENS).await.0
        })
    });
    let tasks: Vec<_> = tasks.collect();
    for (number, task) in tasks.into_iter().enumerate() {
        let text = task.await.expect("the answer is complete");
        assert_eq!(text, *[&base, &one][number % 2]);
    }
    assert!(all_routed(&harness, 0).await > 0.0 && all_routed(&harness, 1).await > 0.0);
    // One adapter is the limit. The place is free when both engines have freed the adapter.
    let (status, text) = load(&harness, "other", "two").await;
    assert!(status == 400 && text.contains("limit of 1"), "{text}");
    assert_eq!(unload(&harness, "mine").await.0, 200);
    assert_eq!(unload(&harness, "mine").await.0, 404);
    for _ in 0..2000 {
        if load(&harness, "mine", "two").await.0 == 200 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    let (text, cached) = answer(&harness, "tiny:mine", TOKENS).await;
    assert_eq!((text, cached), (two, 0));
}

#[test]
fn adapter_that_one_engine_cannot_load_is_loaded_on_neither() {
    let root = adapters([("one", 2, 1)]);
    let folder = root.path().join("one");
    let models = ["a", "b"].map(|device| (device.to_owned(), gemma()));
    let targets = models
        .clone()
        .map(|(_, gemma)| AdapterTargets::of(gemma.model()));
    let options = EngineOptions {
        max_adapters: 1,
        ..EngineOptions::default()
    };
    let (engines, _end) = EnginePool::start(models.into(), &options).expect("the engines start");
    // The second engine gets weights that were read for the first engine's model.
    let error = engines.load_adapter("mine", |_| Ok(targets[0].read(&folder)?));
    let error = error.expect_err("the second engine refuses the weights");
    assert!(error.message.contains("another model"), "{error}");
    assert_eq!(engines.adapter_names(), [""; 0]);
    // The first engine frees its copy soon, and with it the only place.
    let load = |name: &str| engines.load_adapter(name, |engine| Ok(targets[engine].read(&folder)?));
    let is_loaded = (0..2000).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(5));
        load("mine").is_ok()
    });
    assert!(is_loaded);
    assert_eq!(engines.adapter_names(), ["mine"]);
    assert!(load("other").is_err());
}

#[tokio::test]
async fn health_and_metrics_name_the_devices_only_if_there_are_several() {
    let harness = two(EngineOptions::default());
    let health = harness.get("/health").await.ok();
    assert_eq!(
        health,
        json!({"status": "ok", "devices": ["flex:0", "flex:1"]})
    );
    complete(&harness, &prompt(1, 20), 2).await;
    let text = harness.get("/metrics").await.text;
    let series = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    };
    assert!(
        series(&text)
            .iter()
            .all(|line| line.contains("device=\"flex:")),
        "{text}"
    );
    for name in [
        "running_answers",
        "time_to_first_token_seconds",
        "requests_total",
    ] {
        let help = format!("# HELP gemma4_{name} ");
        assert_eq!(text.matches(&help).count(), 1, "{name}: {text}");
    }
    let single = Harness::plain();
    complete(&single, &prompt(1, 20), 2).await;
    let health = single.get("/health").await.ok();
    assert_eq!(health, json!({"status": "ok"}));
    let text = single.get("/metrics").await.text;
    assert!(
        !text.contains("device=") && !text.contains("routed"),
        "{text}"
    );
    assert!(
        series(&text).contains(&"gemma4_prompt_tokens_total 20".to_owned()),
        "{text}"
    );
}

#[tokio::test]
async fn drain_finishes_the_streams_of_both_engines() {
    let server = Listening::start(two(EngineOptions::default()).server).await;
    let address = server.address;
    let streams: Vec<_> = ["x", "y"]
        .map(|text| {
            let body = json!({"messages": user(text), "max_tokens": 400, "ignore_eos": true, "stream": true});
            spawn_blocking(move || exchange(address, &post("/v1/chat/completions", &body)))
        })
        .into();
    while server.metrics().iter().any(|one| one.running.get() == 0) {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    let ended = server.stop();
    let refused = spawn_blocking(move || {
        while exchange(address, &get("/health")).status == 200 {}
        let body = json!({"messages": user("x"), "max_tokens": 2});
        exchange(address, &post("/v1/chat/completions", &body))
    });
    assert_eq!(refused.await.expect("the client ends").status, 503);
    for stream in streams {
        let data = stream.await.expect("the client ends").data();
        assert_eq!(data.last(), Some(&json!("[DONE]")));
        let mut reasons = data
            .iter()
            .filter_map(|chunk: &Value| chunk["choices"][0]["finish_reason"].as_str());
        assert_eq!(reasons.next(), Some("length"));
    }
    assert_eq!(ended.await.expect("the server ends"), Ok(()));
}

#[test]
fn pool_of_different_models_is_refused() {
    let options = EngineOptions::default();
    let device = burn::tensor::Device::flex();
    let half = Gemma4::embedded(&device, LoadOptions::new().dtype(DType::F16));
    let half = half.expect("the model loads");
    for (models, part) in [
        (vec![], "at least one model"),
        (
            vec![("a".to_owned(), gemma()), ("a".to_owned(), gemma())],
            "two models on \"a\"",
        ),
        (
            vec![("a".to_owned(), gemma()), ("b".to_owned(), half)],
            "another model or dtype on \"b\"",
        ),
    ] {
        let error = EnginePool::start(models, &options).expect_err("the models are refused");
        let error = RequestError::from(error);
        assert_eq!(error.kind, ErrorKind::Invalid);
        assert!(error.message.contains(part), "{error}");
    }
}
