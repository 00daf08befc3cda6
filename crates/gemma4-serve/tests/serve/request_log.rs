//! Tests the log of requests: one JSON object for each request.

use crate::harness::{Answer, Harness, post, user, with_model};
use crate::pictures::{base64, image_url, model, png};
use axum::body::Body;
use axum::http::Request;
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::{LOG_TARGET, ServerOptions};
use http_body_util::BodyExt;
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::{Value, json};
use std::sync::{Mutex, Once};
use std::time::Duration;
use tower::ServiceExt;

/// The log lines of all tests in this process.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Lines;

impl Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == LOG_TARGET
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let mut lines = LINES.lock().expect("the lines");
            lines.push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&Lines).expect("no other logger");
        log::set_max_level(LevelFilter::Info);
    });
}

fn id(answer: &Answer) -> String {
    let headers = &answer.headers;
    let id = headers.get("x-request-id").or(headers.get("request-id"));
    id.expect("an id").to_str().expect("ASCII").to_owned()
}

/// Waits until the log has an entry with this request id. Checks that no second entry has this id.
async fn entry(id: &str) -> Value {
    for _ in 0..1000 {
        let lines = LINES.lock().expect("the lines").clone();
        let found: Vec<Value> = lines
            .iter()
            .filter(|line| line.contains(id))
            .map(|line| serde_json::from_str(line).expect("JSON"))
            .collect();
        match &found[..] {
            [] => tokio::time::sleep(Duration::from_millis(5)).await,
            [one] => return one.clone(),
            _ => panic!("{found:?}"),
        }
    }
    panic!("no entry of {id}");
}

#[tokio::test]
async fn each_request_has_one_entry_with_its_counts() {
    listen();
    let harness = Harness::plain();
    let chat = json!({"messages": user("SECRET"), "max_tokens": 5, "ignore_eos": true, "n": 2});
    let responses = json!({"input": "SECRET", "max_output_tokens": 5, "temperature": 0});
    let messages = json!({"messages": user("SECRET"), "max_tokens": 5, "temperature": 0});
    let prompts = json!({"prompt": ["SECRET", "b", "c"], "max_tokens": 5, "ignore_eos": true});
    let paths = [
        ("/v1/chat/completions", "chat", chat, true),
        ("/v1/completions", "completions", prompts, false),
        ("/v1/responses", "responses", responses, true),
        ("/v1/messages", "messages", messages, true),
    ];
    for (path, api, mut body, may_stream) in paths {
        for stream in [false, true]
            .into_iter()
            .filter(|stream| !stream || may_stream)
        {
            body["stream"] = json!(stream);
            let answer = harness.post(path, &with_model(body.clone())).await;
            assert_eq!(answer.status, 200, "{}", answer.text);
            let id = id(&answer);
            assert!(answer.text.contains(&id), "the response's id contains {id}");
            let entry = entry(&id).await;
            assert!(!entry.to_string().contains("SECRET"), "{entry}");
            assert_eq!(
                (&entry["api"], &entry["model"]),
                (&json!(api), &json!("tiny"))
            );
            assert_eq!(
                (&entry["status"], &entry["outcome"]),
                (&json!(200), &json!("finished"))
            );
            let tokens = match api {
                "chat" => 10,
                "completions" => 15,
                _ => 5,
            };
            assert_eq!(entry["output_tokens"], tokens, "{entry}");
            assert!(entry["prompt_tokens"].as_u64() > Some(3), "{entry}");
            let seconds = |name: &str| entry[name].as_f64().expect("seconds");
            let (first, all) = (seconds("time_to_first_token"), seconds("duration"));
            assert!(0.0 < first && first <= all && all < 60.0, "{entry}");
            assert!(seconds("time") > 1e9);
            assert_eq!(entry["error"], Value::Null);
        }
    }
}

#[tokio::test]
async fn refused_and_cancelled_requests_have_an_entry() {
    listen();
    let options = EngineOptions {
        max_running: 1,
        ..EngineOptions::default()
    };
    let harness = Harness::new(options, Default::default());
    let answer = harness
        .chat(json!({"messages": user("x"), "temperature": 9}))
        .await;
    let refused = entry(&id(&answer)).await;
    assert_eq!(
        (&refused["status"], &refused["outcome"]),
        (&json!(400), &json!("refused"))
    );
    let error = refused["error"].as_str().expect("an error");
    assert!(error.contains("temperature"), "{error}");
    assert_eq!(refused["time_to_first_token"], Value::Null);
    let request = Request::get("/v1/messages").body(Body::empty());
    let answer = harness.send(request.expect("a request")).await;
    let wrong = entry(&id(&answer)).await;
    assert_eq!(
        (&wrong["api"], &wrong["status"]),
        (&json!("messages"), &json!(405))
    );

    let long =
        json!({"messages": user("x"), "max_tokens": 7000, "ignore_eos": true, "stream": true});
    let request = post("/v1/chat/completions", &with_model(long));
    let response = harness.router().oneshot(request).await.expect("infallible");
    let header = response.headers()["x-request-id"]
        .to_str()
        .expect("ASCII")
        .to_owned();
    let mut body = response.into_body();
    for _ in 0..4 {
        body.frame().await.expect("a frame").expect("no error");
    }
    drop(body);
    let cancelled = entry(&header).await;
    assert_eq!(
        (&cancelled["status"], &cancelled["outcome"]),
        (&json!(200), &json!("cancelled"))
    );

    // A client that disconnects before the response gets no request id. The test finds the log entry by the prompt's
    // length, because no other test sends such a long chat.
    let words = "x ".repeat(2500);
    let waiting =
        harness.chat(json!({"messages": user(&words), "max_tokens": 4000, "ignore_eos": true}));
    let waited = tokio::time::timeout(Duration::from_millis(300), waiting).await;
    assert!(waited.is_err(), "the answer takes longer");
    for _ in 0..1000 {
        let lines = LINES.lock().expect("the lines").clone();
        let entries = lines
            .iter()
            .map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let mut long = entries
            .filter(|entry| entry["api"] == "chat" && entry["prompt_tokens"].as_u64() > Some(2100));
        if let Some(left) = long.next() {
            assert_eq!(
                (&left["status"], &left["outcome"]),
                (&Value::Null, &json!("cancelled"))
            );
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("no entry of the client that has left");
}

#[tokio::test]
async fn entry_of_request_with_image_has_no_data_of_the_image() {
    listen();
    let models = vec![model("vision-ple")];
    let options = ServerOptions::default();
    let harness = Harness::of_models(models, EngineOptions::default(), options, None);
    let good = png(60, 60, 1, None);
    let data = base64(&good);
    for (file, status, outcome) in [
        (good.clone(), 200, "finished"),
        (good[..900].to_vec(), 400, "refused"),
    ] {
        let content = json!([image_url(&file)]);
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
        let answer = harness
            .post("/v1/chat/completions", &with_model(body))
            .await;
        assert_eq!(answer.status, status, "{}", answer.text);
        let entry = entry(&id(&answer)).await;
        assert_eq!(entry["outcome"], outcome, "{entry}");
        let line = entry.to_string();
        let chunks = data.as_bytes().chunks_exact(16);
        let mut chunks = chunks.map(|chunk| std::str::from_utf8(chunk).expect("ASCII"));
        assert!(chunks.all(|chunk| !line.contains(chunk)), "{line}");
        match status {
            // 8 x 8 soft tokens.
            200 => assert!(entry["prompt_tokens"].as_u64() > Some(64), "{entry}"),
            _ => assert!(line.contains("cannot be decoded"), "{line}"),
        }
    }
}
