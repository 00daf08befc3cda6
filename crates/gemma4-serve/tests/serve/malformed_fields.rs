//! Tests malformed requests that are generated from tables of fields. Each error must have the JSON format of the
//! request's API, and must name the field.

use crate::harness::{Answer, Harness};
use crate::malformed_tables::apis;
use axum::body::Body;
use axum::http::{Method, Request};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use serde_json::json;
use std::time::Duration;

pub async fn send(harness: &Harness, request: Request<Body>) -> Answer {
    let answer = tokio::time::timeout(Duration::from_secs(20), harness.send(request));
    answer.await.expect("an answer without a hang")
}

pub fn post(path: &str, body: Vec<u8>) -> Request<Body> {
    let request = Request::post(path).header("content-type", "application/json");
    request.body(Body::from(body)).expect("a request")
}

/// Checks that an error has the JSON format of the API at `path`. Returns the error message.
pub fn checked(path: &str, answer: &Answer) -> String {
    let json = answer.json();
    let error = &json["error"];
    assert!(error["type"].is_string(), "{path}: {json}");
    match path.starts_with("/v1/messages") {
        true => assert_eq!(json["type"], "error", "{path}: {json}"),
        false => assert!(
            error.get("param").is_some() && error.get("code").is_some(),
            "{json}"
        ),
    }
    let message = error["message"].as_str().expect("a message");
    assert!(
        message.len() < 2000 && !message.contains("untagged"),
        "{path}: {message}"
    );
    message.to_owned()
}

#[tokio::test]
async fn generated_malformed_requests_are_refused_and_the_server_stays_healthy() {
    let harness = Harness::plain();
    let mut count = 0;
    for api in apis() {
        let path = api.path;
        for (body, names) in api.malformed() {
            let shown: String = String::from_utf8_lossy(&body).chars().take(300).collect();
            let answer = send(&harness, post(path, body)).await;
            assert_eq!(answer.status, 400, "{path} {shown}: {}", answer.text);
            let message = checked(path, &answer);
            let is_named = names.iter().any(|name| message.contains(name));
            assert!(is_named, "{path} {shown}: {message}; expected {names:?}");
            count += 1;
        }
        let valid = api.valid.to_string().into_bytes();
        send(&harness, post(path, valid)).await.ok();
    }
    println!("{count} malformed requests");
    assert!(count >= 300, "{count}");
    for name in [
        "queued_requests",
        "prefilling_requests",
        "running_answers",
        "reserved_tokens",
    ] {
        harness.wait_for(&format!("gemma4_{name}"), 0.0).await;
    }
    let failed = harness
        .metric("gemma4_requests_total{outcome=\"failed\"}")
        .await;
    assert_eq!(failed, 0.0);
    assert_eq!(harness.get("/health").await.status, 200);
}

#[tokio::test]
async fn wrong_methods_media_types_sizes_and_keys_are_refused_on_every_path() {
    let options = ServerOptions {
        max_body: 2000,
        api_keys: vec!["secret".into()],
        ..ServerOptions::default()
    };
    let harness = Harness::new(EngineOptions::default(), options);
    let request = |method: Method, path: &str, headers: &[(&str, &str)], body: String| {
        let request = Request::builder().method(method).uri(path);
        let request = headers.iter().fold(request, |request, (name, value)| {
            request.header(*name, *value)
        });
        request.body(Body::from(body)).expect("a request")
    };
    let key = ("x-api-key", "secret");
    let json_type = ("content-type", "application/json");
    for api in apis() {
        let (path, valid) = (api.path, api.valid.to_string());
        let check = async |request, status: u16, part: &str| {
            let answer = send(&harness, request).await;
            assert_eq!(answer.status, status, "{path}: {}", answer.text);
            let message = checked(path, &answer);
            assert!(message.contains(part), "{path}: {message}");
        };
        for method in [
            Method::GET,
            Method::PUT,
            Method::DELETE,
            Method::PATCH,
            Method::OPTIONS,
        ] {
            let name = method.to_string();
            check(request(method, path, &[key], String::new()), 405, &name).await;
        }
        for media_type in [
            "",
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/jsonx",
        ] {
            let headers = [key, ("content-type", media_type)];
            check(
                request(Method::POST, path, &headers, valid.clone()),
                415,
                "Content-Type",
            )
            .await;
        }
        check(
            request(Method::POST, path, &[key], valid.clone()),
            415,
            "Content-Type",
        )
        .await;
        let large = format!("{valid:3000}");
        check(
            request(Method::POST, path, &[key, json_type], large),
            413,
            "2000 bytes",
        )
        .await;
        for wrong in [
            ("accept", "*/*"),
            ("x-api-key", "Secret"),
            ("authorization", "secret"),
            ("authorization", "Basic secret"),
            ("authorization", "Bearer secret2"),
        ] {
            // The body is malformed too, but the server checks the key before the body.
            let headers = [wrong, json_type];
            check(
                request(Method::POST, path, &headers, "{".into()),
                401,
                "API key",
            )
            .await;
        }
        let headers = [key, json_type];
        let answer = send(&harness, request(Method::POST, path, &headers, valid)).await;
        answer.ok();
        if api.is_anthropic() {
            assert!(answer.headers.contains_key("request-id"));
        } else {
            assert!(answer.headers.contains_key("x-request-id"));
        }
    }
}

#[tokio::test]
async fn prompt_that_is_many_times_too_long_is_refused_without_encoding() {
    let harness = Harness::plain();
    let long = "word ".repeat(1 << 18);
    for api in apis() {
        let body = api
            .valid
            .to_string()
            .replace("\"x\"", &json!(long).to_string());
        let answer = send(&harness, post(api.path, body.into_bytes())).await;
        assert_eq!(answer.status, 400, "{:.300}", answer.text);
        let message = checked(api.path, &answer);
        // The words "at least" show that the server did not encode the prompt. After encoding, the error would state
        // the exact number of tokens.
        let bound = "the context has 8192 tokens, but the prompt has at least 485";
        assert!(message.contains(bound), "{message}");
    }
    // The lower bound must not refuse a prompt that fits. In this model's tokenizer, up to 8 spaces form one token, so
    // these spaces are about 8,100 tokens.
    let spaces = " ".repeat(8 * 8100);
    let body = json!({"prompt": spaces, "max_tokens": 1, "temperature": 0});
    harness.complete(body).await.ok();
}
