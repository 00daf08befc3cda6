//! Tests how a server and its connections end. Covers the drain, the limit on the number of connections, and clients
//! that send no complete request.

use crate::harness::{Harness, user};
use crate::socket::{Listening, exchange, get, post};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};
use tokio::task::spawn_blocking;

/// Waits until the engine generates at least one answer.
async fn wait_running(server: &Listening) {
    while server.metrics().iter().all(|one| one.running.get() == 0) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn drain_finishes_streams_and_refuses_new_requests() {
    let server = Listening::start(Harness::plain().server).await;
    let address = server.address;
    let body =
        json!({"messages": user("x"), "max_tokens": 400, "ignore_eos": true, "stream": true});
    let stream = spawn_blocking(move || exchange(address, &post("/v1/chat/completions", &body)));
    wait_running(&server).await;
    let ended = server.stop();
    let refused = spawn_blocking(move || {
        // The shutdown begins on another thread, so the first requests may still be accepted. Wait until a request is
        // refused.
        while exchange(address, &get("/health")).status == 200 {}
        let body = json!({"messages": user("x"), "max_tokens": 2});
        let health = exchange(address, &get("/health"));
        let chat = exchange(address, &post("/v1/chat/completions", &body));
        (
            health,
            chat,
            exchange(address, &post("/v1/messages", &body)),
        )
    });
    let (health, chat, messages) = refused.await.expect("the client ends");
    assert_eq!(
        (health.status, health.json()),
        (503, json!({"status": "draining"}))
    );
    for (response, kind) in [
        (chat, "service_unavailable_error"),
        (messages, "overloaded_error"),
    ] {
        assert_eq!(response.status, 503, "{response:?}");
        assert!(
            response.head.contains("retry-after: 1\r\n"),
            "{}",
            response.head
        );
        assert!(
            response.head.contains("connection: close\r\n"),
            "{}",
            response.head
        );
        assert_eq!(response.json()["error"]["type"], kind);
    }
    let stream = stream.await.expect("the client ends");
    assert_eq!(stream.status, 200);
    let data = stream.data();
    assert_eq!(data.last(), Some(&json!("[DONE]")));
    let reasons = data
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["finish_reason"].as_str());
    assert_eq!(reasons.collect::<Vec<_>>(), ["length"]);
    assert_eq!(ended.await.expect("the server ends"), Ok(()));
    assert!(
        TcpStream::connect(address).is_err(),
        "the listener is closed"
    );
}

#[tokio::test]
async fn drain_ends_at_its_timeout_and_closes_idle_connections_at_once() {
    let options = ServerOptions {
        drain_timeout: Duration::from_secs(2),
        ..ServerOptions::default()
    };
    let server = Harness::new(EngineOptions::default(), options).server;
    let server = Listening::start(server).await;
    let address = server.address;
    let mut idle = TcpStream::connect(address).expect("a connection");
    let health = "GET /health HTTP/1.1\r\nhost: x\r\n\r\n";
    idle.write_all(health.as_bytes())
        .expect("the request is sent");
    let body = json!({"messages": user("x"), "max_tokens": 7000, "ignore_eos": true});
    let stream = spawn_blocking(move || exchange(address, &post("/v1/chat/completions", &body)));
    wait_running(&server).await;
    let (started, metrics) = (Instant::now(), server.metrics());
    let ended = server.stop();
    let closed = spawn_blocking(move || {
        let mut text = String::new();
        idle.read_to_string(&mut text)
            .expect("the connection closes");
        (text, Instant::now())
    });
    let (text, closed) = closed.await.expect("the client ends");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    assert!(
        closed - started < Duration::from_millis(1500),
        "{:?}",
        closed - started
    );
    assert_eq!(ended.await.expect("the server ends"), Ok(()));
    let elapsed = started.elapsed();
    assert!(elapsed >= Duration::from_secs(2), "{elapsed:?}");
    assert!(elapsed < Duration::from_secs(10), "{elapsed:?}");
    // The server has cut the connection, so the engine must stop generating the connection's answer.
    assert_eq!(stream.await.expect("the client ends").body, "");
    while metrics.iter().any(|one| one.running.get() > 0) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn connection_beyond_the_limit_waits() {
    let options = ServerOptions {
        max_connections: 1,
        ..ServerOptions::default()
    };
    let server = Harness::new(EngineOptions::default(), options).server;
    let server = Listening::start(server).await;
    let address = server.address;
    let client = spawn_blocking(move || {
        let first = TcpStream::connect(address).expect("a connection");
        // The server must accept the first connection before the second one begins.
        std::thread::sleep(Duration::from_millis(100));
        let mut second = TcpStream::connect(address).expect("a connection");
        second
            .write_all(&get("/health"))
            .expect("the request is sent");
        second
            .set_read_timeout(Some(Duration::from_millis(200)))
            .expect("a timeout");
        let mut byte = [0];
        assert!(
            second.read(&mut byte).is_err(),
            "the second connection waits"
        );
        drop(first);
        second.set_read_timeout(None).expect("a timeout");
        let mut text = String::new();
        second
            .read_to_string(&mut text)
            .expect("the response arrives");
        text
    });
    let text = client.await.expect("the client ends");
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
}

#[tokio::test]
async fn silent_connections_are_closed_after_the_header_timeout() {
    let options = ServerOptions {
        header_timeout: Duration::from_millis(300),
        ..ServerOptions::default()
    };
    let server = Harness::new(EngineOptions::default(), options).server;
    let server = Listening::start(server).await;
    let address = server.address;
    for sent in [
        "",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
        // After the answer to this complete request, the client sends no further request. The time limit of the headers
        // also applies to such a wait.
        "GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    ] {
        let closed = spawn_blocking(move || {
            let mut stream = TcpStream::connect(address).expect("a connection");
            stream
                .write_all(sent.as_bytes())
                .expect("the bytes are sent");
            stream
                .set_read_timeout(Some(Duration::from_secs(20)))
                .expect("a timeout");
            let started = Instant::now();
            let mut text = String::new();
            stream
                .read_to_string(&mut text)
                .expect("the connection closes");
            (started.elapsed(), text)
        });
        let (elapsed, text) = closed.await.expect("the client ends");
        assert!(
            elapsed >= Duration::from_millis(200),
            "{sent:?}: {elapsed:?}"
        );
        assert_eq!(
            text.starts_with("HTTP/1.1 200"),
            sent.starts_with("GET"),
            "{text}"
        );
    }
    let health = spawn_blocking(move || exchange(address, &get("/health")));
    assert_eq!(health.await.expect("the client ends").status, 200);
}
