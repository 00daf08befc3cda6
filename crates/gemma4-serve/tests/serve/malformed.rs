//! Tests that malformed requests get a clear error in the JSON format of their API, and do not affect other requests.

use crate::harness::{Harness, post, user, with_model};
use crate::malformed_requests::{chat_requests, completion_requests, message_requests};
use axum::body::Body;
use axum::http::Request;
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use serde_json::{Value, json};

async fn check(harness: &Harness, path: &str, requests: Vec<(Value, &str)>) {
    for (body, part) in requests {
        let answer = harness.post(path, &with_model(body.clone())).await;
        let shown: String = body.to_string().chars().take(200).collect();
        assert_eq!(answer.status, 400, "{path} {shown}: {}", answer.text);
        let json = answer.json();
        let error = &json["error"];
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(part), "{path} {shown}: {message}");
        assert!(message.len() < 2000, "{path} {shown}: {message}");
        assert!(error["type"].is_string(), "{json}");
        match path {
            "/v1/messages" => assert_eq!(json["type"], "error"),
            _ => assert!(error.get("param").is_some() && error.get("code").is_some()),
        }
    }
}

#[tokio::test]
async fn malformed_requests_are_refused_with_the_field_at_fault() {
    let harness = Harness::plain();
    let valid = json!({"messages": user("x"), "max_tokens": 4, "temperature": 0});
    let before = harness.chat(valid.clone()).await.ok();
    check(&harness, "/v1/chat/completions", chat_requests()).await;
    check(&harness, "/v1/completions", completion_requests()).await;
    check(&harness, "/v1/messages", message_requests()).await;
    let after = harness.chat(valid).await.ok();
    assert_eq!(before["choices"], after["choices"]);
    assert_eq!(harness.metric("gemma4_queued_requests").await, 0.0);
}

#[tokio::test]
async fn malformed_http_is_refused_in_the_form_of_the_api() {
    let options = ServerOptions {
        max_body: 1000,
        ..ServerOptions::default()
    };
    let harness = Harness::new(EngineOptions::default(), options);
    let raw = |path: &str, media_type: &str, body: String| {
        let request = Request::post(path).header("content-type", media_type);
        request.body(Body::from(body)).expect("a request")
    };
    let valid = with_model(json!({"messages": user("x"), "max_tokens": 2}));
    let chat = "/v1/chat/completions";
    let json_type = "application/json";
    for (request, status) in [
        (raw(chat, json_type, "{".into()), 400),
        (raw(chat, json_type, "".into()), 400),
        (raw(chat, json_type, "null".into()), 400),
        (raw(chat, json_type, "\u{0}".into()), 400),
        (raw(chat, json_type, format!("{valid}x")), 400),
        (
            raw(chat, json_type, format!("{:2000}", valid.to_string())),
            413,
        ),
        (raw(chat, "text/plain", valid.to_string()), 415),
        (raw("/v1/unknown", json_type, "{}".into()), 404),
        (raw("/v1/models", json_type, "{}".into()), 405),
        (
            Request::get(chat).body(Body::empty()).expect("a request"),
            405,
        ),
        (
            Request::get("/v1/messages")
                .body(Body::empty())
                .expect("a request"),
            405,
        ),
        (
            post(chat, &json!({"model": "other", "messages": user("x")})),
            404,
        ),
        (
            post(
                "/v1/messages",
                &json!({"model": "other", "max_tokens": 2, "messages": user("x")}),
            ),
            404,
        ),
        (raw("/v1/messages", json_type, "{".into()), 400),
        (raw("/v1/messages", "text/plain", "{}".into()), 415),
    ] {
        let path = request.uri().path().to_owned();
        let answer = harness.send(request).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.text);
        let json = answer.json();
        assert!(json["error"]["message"].is_string(), "{json}");
        assert_eq!(
            json["type"] == "error",
            path.starts_with("/v1/messages"),
            "{json}"
        );
    }
    let mut bytes = Request::post(chat)
        .body(Body::from(vec![0xff, 0xfe]))
        .expect("a request");
    bytes
        .headers_mut()
        .insert("content-type", "application/json".parse().expect("a value"));
    assert_eq!(harness.send(bytes).await.status, 400);
}

#[tokio::test]
async fn wrong_api_keys_are_refused() {
    let options = ServerOptions {
        api_keys: vec!["secret".into(), "other".into()],
        ..ServerOptions::default()
    };
    let harness = Harness::new(EngineOptions::default(), options);
    let models = |name: &str, value: &str| {
        let request = Request::get("/v1/models").header(name, value);
        request.body(Body::empty()).expect("a request")
    };
    for (name, value, status) in [
        ("authorization", "Bearer secret", 200),
        ("authorization", "Bearer other", 200),
        ("x-api-key", "secret", 200),
        ("authorization", "Bearer secre", 401),
        ("authorization", "Bearer secrets", 401),
        ("authorization", "secret", 401),
        ("authorization", "Bearer ", 401),
        ("x-api-key", "", 401),
        ("accept", "x", 401),
    ] {
        let answer = harness.send(models(name, value)).await;
        assert_eq!(answer.status, status, "{name}: {value}");
    }
    let answer = harness
        .messages(json!({"max_tokens": 2, "messages": user("x")}))
        .await;
    assert_eq!(answer.status, 401);
    assert_eq!(answer.json()["error"]["type"], "authentication_error");
    assert_eq!(harness.get("/metrics").await.status, 401);
    assert_eq!(harness.get("/health").await.status, 200);
    assert_eq!(harness.get("/").await.status, 200);
}
