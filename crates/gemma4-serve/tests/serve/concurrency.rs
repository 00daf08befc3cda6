//! Tests concurrent requests. Each answer must equal the answer that the server gives if it processes only this
//! request. If a request is cancelled, the engine must stop generating its answers.

use crate::harness::{Harness, gemma, user, with_model};
use axum::body::Body;
use axum::http::Request;
use burn::tensor::Device;
use burn_gemma4::{Gemma4, GenerateOptions, LoadOptions, Sampling};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::{AnswerOptions, EndReason, Engine, EngineOptions, Event};
use rand::{Rng, SeedableRng, rngs::StdRng};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::{Value, json};
use std::fs;
use std::ops::ControlFlow;
use std::time::Duration;
use tower::ServiceExt;

/// Returns the options of an answer with greedy decoding and the model's stop tokens.
fn answer_options(gemma: &Gemma4, max_tokens: usize) -> AnswerOptions {
    AnswerOptions {
        max_tokens,
        min_tokens: 0,
        sampling: Sampling::greedy(),
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        begin_suppress_tokens: Vec::new(),
        stop_tokens: gemma.options().stop_tokens,
        ignore_stop_tokens: false,
        stop_strings: Vec::new(),
        logprobs: None,
        has_parts: true,
        max_thinking_tokens: None,
        single_tool_call: false,
    }
}

fn random_prompt(rng: &mut StdRng) -> Vec<u32> {
    // Make some prompts longer than the sliding window of 128 tokens, so that the ring buffers of the KV cache wrap around.
    let length = match rng.random_bool(0.2) {
        true => rng.random_range(100..400),
        false => rng.random_range(1..60),
    };
    (0..length).map(|_| rng.random_range(20..2000)).collect()
}

#[tokio::test]
async fn random_requests_equal_the_same_requests_alone() {
    const REQUESTS: usize = 60;
    let alone = gemma();
    let mut rng = StdRng::seed_from_u64(1);
    let options = EngineOptions {
        max_running: 9,
        prefill_chunk: Some(50),
        ..EngineOptions::default()
    };
    let (engine, outcome) = Engine::start(gemma(), options).expect("the engine starts");
    let mut tasks = Vec::new();
    for number in 0..REQUESTS {
        let prompt = random_prompt(&mut rng);
        let max_tokens = rng.random_range(1..40);
        let mut options = answer_options(&alone, max_tokens);
        if rng.random_bool(0.4) {
            options.sampling = Sampling {
                temperature: rng.random_range(0.3..1.5),
                top_k: rng.random_bool(0.5).then_some(40),
                top_p: rng.random_bool(0.5).then_some(0.9),
                min_p: rng.random_bool(0.3).then_some(0.05),
                repetition_penalty: if rng.random_bool(0.3) { 1.2 } else { 1.0 },
                seed: Some(number as u64),
                ..Sampling::greedy()
            };
        }
        if rng.random_bool(0.3) {
            options.logprobs = Some(2);
        }
        let expected = alone
            .generate(
                prompt.clone(),
                &GenerateOptions {
                    max_tokens,
                    sampling: options.sampling.clone(),
                    ..alone.options()
                },
                |_| ControlFlow::Continue(()),
            )
            .expect("the generation succeeds");
        let case = format!(
            "request {number}, {} prompt tokens, {:?}, logprobs {:?}",
            prompt.len(),
            options.sampling,
            options.logprobs
        );
        let is_cancelled = rng.random_bool(0.25);
        let request = gemma4_serve::engine::Request {
            prompt: prompt.into(),
            choices: if rng.random_bool(0.2) && options.sampling.is_greedy() {
                2
            } else {
                1
            },
            options,
            constraint: None,
            adapter: None,
            media_memory: None,
        };
        let choices = request.choices;
        let mut events = engine.submit(request).expect("the queue is not full");
        let engine = engine.clone();
        tasks.push(tokio::spawn(async move {
            let (mut texts, mut ended) = (vec![String::new(); choices], 0);
            let mut received = 0;
            while ended < choices {
                match events.recv().await {
                    Some(Event::Text { choice, text, .. }) => texts[choice] += &text,
                    Some(Event::End { usage, reason, .. }) => {
                        assert_eq!(usage.tokens, expected.tokens.len(), "request {number}");
                        let is_length = reason == EndReason::Length;
                        assert_eq!(
                            is_length,
                            expected.finish_reason == burn_gemma4::FinishReason::Length
                        );
                        ended += 1;
                    }
                    Some(Event::ToolCall { .. }) => (),
                    Some(Event::Failed(error)) => panic!("request {number}: {error}"),
                    None => panic!("request {number}: {}", engine.stopped().await),
                }
                received += 1;
                if is_cancelled && received == 3 {
                    // The return drops the receiver, which cancels the request.
                    return;
                }
            }
            if expected.tool_calls.is_empty() && expected.thoughts.is_empty() {
                for text in texts {
                    assert_eq!(text, expected.text, "{case}");
                }
            }
        }));
    }
    for task in tasks {
        task.await.expect("each request succeeds");
    }
    engine.drain();
    let ended = outcome.await.expect("the engine reports its end");
    assert_eq!(ended, Ok(()));
    assert_eq!(engine.metrics().running.get(), 0);
    assert_eq!(engine.metrics().queued.get(), 0);
    assert_eq!(
        engine.metrics().cache_bytes.get(),
        0,
        "the KV cache is free"
    );
}

/// Prompts that wait while another prompt is read run in one pass. Some of them have two answers, and some draw tokens.
#[tokio::test]
async fn waiting_prompts_run_in_one_pass_with_the_same_answers() {
    let alone = gemma();
    let mut rng = StdRng::seed_from_u64(4);
    let (engine, outcome) =
        Engine::start(gemma(), EngineOptions::default()).expect("the engine starts");
    let mut expected = Vec::new();
    let lengths = [700, 30, 1, 200, 7, 128, 40, 129, 3, 90, 12, 60];
    for (number, length) in lengths.into_iter().enumerate() {
        let prompt: Vec<u32> = (0..length).map(|_| rng.random_range(20..2000)).collect();
        let mut options = answer_options(&alone, 8);
        if number % 3 == 1 {
            options.sampling = Sampling {
                temperature: 0.8,
                seed: Some(number as u64),
                ..Sampling::greedy()
            };
        }
        let request = gemma4_serve::engine::Request {
            prompt: prompt.clone().into(),
            choices: 1 + number % 2,
            options,
            constraint: None,
            adapter: None,
            media_memory: None,
        };
        let (sampling, choices) = (request.options.sampling.clone(), request.choices);
        let events = engine.submit(request).expect("the queue is not full");
        expected.push((number, prompt, sampling, choices, events));
    }
    for (number, prompt, sampling, choices, mut events) in expected {
        let (mut texts, mut ended) = (vec![String::new(); choices], 0);
        while ended < choices {
            match events.recv().await.expect("the engine runs") {
                Event::Text { choice, text, .. } => texts[choice] += &text,
                Event::End { .. } => ended += 1,
                Event::ToolCall { .. } => (),
                Event::Failed(error) => panic!("request {number}: {error}"),
            }
        }
        for (choice, text) in texts.into_iter().enumerate() {
            let options = GenerateOptions {
                max_tokens: 8,
                sampling: Sampling {
                    seed: sampling.seed.map(|seed| seed + choice as u64),
                    ..sampling.clone()
                },
                ..alone.options()
            };
            let whole = alone.generate(prompt.clone(), &options, |_| ControlFlow::Continue(()));
            let whole = whole.expect("the generation succeeds");
            let case = format!("request {number}, {} tokens", prompt.len());
            assert_eq!(text, whole.text, "{case}, answer {choice}");
        }
    }
    let metrics = engine.metrics();
    assert!(metrics.packed_prompts.get() >= 2, "prompts wait together");
    let all: usize = lengths.iter().sum();
    assert_eq!(metrics.prompt_tokens.get(), all as u64);
    engine.drain();
    assert_eq!(outcome.await.expect("the engine reports its end"), Ok(()));
    assert_eq!(engine.metrics().prefilling.get(), 0);
    assert_eq!(engine.metrics().reserved_tokens.get(), 0);
}

/// Returns a copy of the embedded model in which the per-layer embedding of `token` is NaN.
fn gemma_with_nan(token: u32) -> Gemma4 {
    let embedded = concat!(env!("CARGO_MANIFEST_DIR"), "/../burn-gemma4/embedded");
    let folder = tempfile::tempdir().expect("a folder is created");
    for name in ["config.json", "generation_config.json", "tokenizer.json"] {
        let source = format!("{embedded}/{name}");
        fs::copy(source, folder.path().join(name)).expect("the file is copied");
    }
    let file = fs::read(format!("{embedded}/model.safetensors")).expect("the file is readable");
    let tensors = SafeTensors::deserialize(&file).expect("the tensors parse");
    let tensors = tensors.iter().map(|(name, view)| {
        let mut bytes = view.data().to_vec();
        if name.ends_with("embed_tokens_per_layer.weight") {
            assert_eq!(view.dtype(), Dtype::BF16);
            let row = bytes.len() / view.shape()[0];
            let numbers = &mut bytes[token as usize * row..][..row];
            for number in numbers.as_chunks_mut::<2>().0 {
                *number = 0x7fc0u16.to_le_bytes();
            }
        }
        (name.to_owned(), view.dtype(), view.shape().to_vec(), bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes);
        (name, view.expect("the bytes fit the shape"))
    });
    let changed = serialize(views, None).expect("the tensors are valid");
    fs::write(folder.path().join("model.safetensors"), changed).expect("the file is written");
    let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
    gemma.expect("the checkpoint is valid")
}

/// One of the prompts that run in one pass has NaN in its keys. Only this prompt fails, and the prefix cache keeps no
/// NaN: the same prompts have the same answers afterwards.
#[tokio::test]
async fn nan_in_one_of_the_waiting_prompts_fails_only_that_prompt() {
    const BAD: u32 = 1999;
    let alone = gemma_with_nan(BAD);
    let engine = Engine::start(gemma_with_nan(BAD), EngineOptions::default());
    let (engine, outcome) = engine.expect("the engine starts");
    let mut rng = StdRng::seed_from_u64(6);
    let mut prompts: Vec<Vec<u32>> = [150, 40, 33, 20]
        .into_iter()
        .map(|length| (0..length).map(|_| rng.random_range(20..1999)).collect())
        .collect();
    prompts[1][30] = BAD;
    let options = answer_options(&alone, 4);
    for round in 0..2 {
        let submit = |prompt: &Vec<u32>| {
            let request = gemma4_serve::engine::Request {
                prompt: prompt.clone().into(),
                choices: 1,
                options: options.clone(),
                constraint: None,
                adapter: None,
                media_memory: None,
            };
            engine.submit(request).expect("the queue is not full")
        };
        let events: Vec<_> = prompts.iter().map(submit).collect();
        for (index, (prompt, mut events)) in prompts.iter().zip(events).enumerate() {
            let mut found = String::new();
            let has_failed = loop {
                match events.recv().await.expect("the engine runs") {
                    Event::Text { text, .. } => found += &text,
                    Event::End { .. } => break false,
                    Event::ToolCall { .. } => (),
                    Event::Failed(_) => break true,
                }
            };
            assert_eq!(has_failed, index == 1, "round {round}, prompt {index}");
            if !has_failed {
                let options = GenerateOptions {
                    max_tokens: 4,
                    sampling: Sampling::greedy(),
                    ..alone.options()
                };
                let whole = alone.generate(prompt.clone(), &options, |_| ControlFlow::Continue(()));
                let whole = whole.expect("the prompt has no NaN");
                assert_eq!(found, whole.text, "round {round}, prompt {index}");
            }
        }
    }
    engine.drain();
    assert_eq!(outcome.await.expect("the engine reports its end"), Ok(()));
}

/// Prompts with the same beginning wait until one of them is read. The others then continue from its keys and values in
/// one pass. The beginning is longer than the window, so that the first prompt must take a checkpoint for the others.
#[tokio::test]
async fn waiting_prompts_with_a_shared_prefix_reuse_it_in_one_pass() {
    const SHARED: usize = 300;
    let alone = gemma();
    assert!(alone.config().sliding_window < SHARED);
    let (engine, outcome) =
        Engine::start(gemma(), EngineOptions::default()).expect("the engine starts");
    let options = answer_options(&alone, 4);
    let request = |prompt: &[u32]| {
        let request = gemma4_serve::engine::Request {
            prompt: prompt.to_vec().into(),
            choices: 1,
            options: options.clone(),
            constraint: None,
            adapter: None,
            media_memory: None,
        };
        engine.submit(request).expect("the queue is not full")
    };
    let mut rng = StdRng::seed_from_u64(8);
    let mut draw =
        |count: usize| -> Vec<u32> { (0..count).map(|_| rng.random_range(20..1999)).collect() };
    let (before, prefix) = (draw(2000), draw(SHARED));
    let rests = (0..6).map(|last| [vec![30 + last], draw(4 + last as usize)].concat());
    let mut prompts: Vec<Vec<u32>> = rests.map(|rest| [&prefix[..], &rest].concat()).collect();
    // The engine reads another prompt until all requests wait.
    prompts.insert(0, before);
    let events: Vec<_> = prompts.iter().map(|prompt| request(prompt)).collect();
    for (prompt, mut events) in prompts.iter().zip(events) {
        let mut found = String::new();
        loop {
            match events.recv().await.expect("the engine runs") {
                Event::Text { text, .. } => found += &text,
                Event::End { .. } => break,
                Event::ToolCall { .. } => (),
                Event::Failed(error) => panic!("{} tokens: {error}", prompt.len()),
            }
        }
        let options = GenerateOptions {
            max_tokens: 4,
            sampling: Sampling::greedy(),
            ..alone.options()
        };
        let whole = alone.generate(prompt.clone(), &options, |_| ControlFlow::Continue(()));
        let whole = whole.expect("the generation succeeds");
        assert_eq!(found, whole.text, "{} tokens", prompt.len());
    }
    let metrics = engine.metrics();
    assert_eq!(metrics.cached_prompt_tokens.get(), 5 * SHARED as u64);
    assert_eq!(metrics.packed_prompts.get(), 5);
    let all: usize = prompts.iter().map(Vec::len).sum();
    assert_eq!(metrics.prompt_tokens.get(), (all - 5 * SHARED) as u64);
    engine.drain();
    assert_eq!(outcome.await.expect("the engine reports its end"), Ok(()));
    assert_eq!(engine.metrics().reserved_tokens.get(), 0);
}

#[tokio::test]
async fn full_queue_refuses_requests_and_recovers() {
    let options = EngineOptions {
        max_running: 1,
        max_queue: 2,
        ..EngineOptions::default()
    };
    let harness = std::sync::Arc::new(Harness::new(options, ServerOptions::default()));
    let body =
        json!({"messages": user("x"), "max_tokens": 60, "ignore_eos": true, "temperature": 0});
    let mut tasks = Vec::new();
    for _ in 0..12 {
        let (harness, body) = (harness.clone(), body.clone());
        tasks.push(tokio::spawn(async move { harness.chat(body).await }));
    }
    let (mut served, mut refused) = (0, 0);
    for task in tasks {
        let answer = task.await.expect("the task ends");
        match answer.status.as_u16() {
            200 => served += 1,
            429 => {
                refused += 1;
                assert_eq!(answer.headers["retry-after"], "1");
                assert_eq!(answer.json()["error"]["type"], "rate_limit_error");
            }
            status => panic!("{status}: {}", answer.text),
        }
    }
    assert!(served >= 2 && refused >= 1, "{served} {refused}");
    harness
        .chat(json!({"messages": user("x"), "max_tokens": 2}))
        .await
        .ok();
}

#[tokio::test]
async fn dropped_client_frees_its_place_at_once() {
    let options = EngineOptions {
        max_running: 1,
        ..EngineOptions::default()
    };
    let harness = Harness::new(options, ServerOptions::default());
    let long = json!({
        "messages": user("x"), "max_tokens": 7000, "ignore_eos": true, "stream": true, "temperature": 0,
    });
    let request = crate::harness::post("/v1/chat/completions", &with_model(long));
    let response = harness.router().oneshot(request).await.expect("infallible");
    assert_eq!(response.status(), 200);
    harness.wait_for("gemma4_running_answers", 1.0).await;
    drop(response);
    let started = std::time::Instant::now();
    let body = json!({"messages": user("y"), "max_tokens": 2, "temperature": 0});
    harness.chat(body).await.ok();
    assert!(started.elapsed() < Duration::from_secs(5));
    harness.wait_for("gemma4_running_answers", 0.0).await;
}

#[tokio::test]
async fn slow_client_does_not_delay_others() {
    let harness = Harness::plain();
    let long = json!({
        "messages": user("x"), "max_tokens": 300, "ignore_eos": true, "stream": true, "temperature": 0,
    });
    let request = crate::harness::post("/v1/chat/completions", &with_model(long));
    // This client is slow: the test reads the response's body only after the other requests have ended.
    let slow = harness.router().oneshot(request).await.expect("infallible");
    for _ in 0..3 {
        let body = json!({"messages": user("y"), "max_tokens": 5, "temperature": 0});
        harness.chat(body).await.ok();
    }
    harness.wait_for("gemma4_running_answers", 0.0).await;
    let body = http_body_util::BodyExt::collect(slow.into_body())
        .await
        .expect("the body");
    let text = String::from_utf8(body.to_bytes().to_vec()).expect("UTF-8");
    assert!(text.trim_end().ends_with("data: [DONE]"));
}

#[tokio::test]
async fn request_beyond_the_kv_cache_is_refused() {
    let options = EngineOptions {
        kv_tokens: Some(2048),
        ..EngineOptions::default()
    };
    let harness = Harness::new(options, ServerOptions::default());
    let body = json!({"messages": user("x"), "max_tokens": 3000});
    let answer = harness.chat(body).await;
    assert_eq!(answer.status, 400);
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
    // Check that the engine still answers two concurrent requests that each fit into the KV cache.
    let body = json!({"messages": user("x"), "max_tokens": 20, "n": 2, "temperature": 0});
    let (first, second) = tokio::join!(harness.chat(body.clone()), harness.chat(body));
    assert_eq!(first.ok()["choices"], second.ok()["choices"]);
}

#[tokio::test]
async fn heartbeats_are_sent_while_an_answer_waits() {
    let engine = EngineOptions {
        max_running: 1,
        ..EngineOptions::default()
    };
    let options = ServerOptions {
        heartbeat: Duration::from_millis(20),
        ..ServerOptions::default()
    };
    let harness = Harness::new(engine, options);
    let long = |stream| json!({"messages": user("x"), "max_tokens": 400, "ignore_eos": true, "temperature": 0, "stream": stream});
    let first = harness.chat(long(false));
    let second = async {
        harness.wait_for("gemma4_running_answers", 1.0).await;
        harness
            .chat(json!({"messages": user("y"), "max_tokens": 1, "stream": true}))
            .await
    };
    let third = async {
        harness.wait_for("gemma4_running_answers", 1.0).await;
        harness
            .messages(json!({"messages": user("y"), "max_tokens": 1, "stream": true}))
            .await
    };
    let (first, second, third) = tokio::join!(first, second, third);
    first.ok();
    assert!(
        second.text.lines().any(|line| line.starts_with(':')),
        "{}",
        second.text
    );
    assert!(third.text.contains("event: ping"), "{}", third.text);
}

#[tokio::test]
async fn unread_request_bodies_do_not_panic_the_server() {
    let harness = Harness::plain();
    // The request's body ends with an error, as if the client had disconnected while it sent the body.
    let stream = futures_util::stream::iter([
        Ok::<_, std::io::Error>(Vec::from(&b"{\"model\":"[..])),
        Err(std::io::Error::other("gone")),
    ]);
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .body(Body::from_stream(stream))
        .expect("a request");
    assert_eq!(harness.send(request).await.status, 400);
    let answer: Value = harness
        .chat(json!({"messages": user("x"), "max_tokens": 1}))
        .await
        .ok();
    assert_eq!(answer["object"], "chat.completion");
}
