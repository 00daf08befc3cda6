//! Tests the limits on the bodies of requests: a client sees the error for a body that is too large, and the bodies of
//! all requests share a limited memory.

use crate::client;
use crate::harness::{Harness, with_model};
use crate::socket::{Listening, exchange};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const PATH: &str = "/v1/completions";

fn harness(options: ServerOptions) -> Harness {
    Harness::new(EngineOptions::default(), options)
}

/// Returns the headers of a request whose body has `length` bytes.
fn headers(length: usize, more: &str) -> String {
    format!(
        "POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
         connection: close\r\n{more}\r\n"
    )
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = client::connect(address).expect("the server listens");
    let patience = Some(Duration::from_secs(60));
    stream.set_read_timeout(patience).expect("a time");
    stream
}

/// Without reading the rest of the body, the server would reset the connection, and the client would see no answer.
#[tokio::test]
async fn client_that_sends_a_body_that_is_too_large_sees_the_error() {
    let harness = harness(ServerOptions {
        max_body: 1000,
        ..ServerOptions::default()
    });
    let server = Listening::start(harness.server).await;
    let address = server.address;
    let sent = tokio::task::spawn_blocking(move || {
        let body = "a".repeat(20 << 20);
        let request = headers(body.len(), "") + &body;
        let with_length = exchange(address, request.as_bytes());
        let chunked = format!(
            "POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\
             connection: close\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
            body.len()
        );
        // A client that waits for "100 Continue" gets the error in its place.
        let mut waiting = connect(address);
        let request = headers(20 << 20, "expect: 100-continue\r\n");
        waiting
            .write_all(request.as_bytes())
            .expect("the server reads");
        let mut early = String::new();
        waiting
            .read_to_string(&mut early)
            .expect("the server answers");
        (with_length, exchange(address, chunked.as_bytes()), early)
    });
    let (with_length, chunked, early) = sent.await.expect("no panic");
    for answer in [&with_length, &chunked] {
        assert_eq!(answer.status, 413, "{}", answer.body);
        assert!(
            answer.body.contains("expected at most 1000 bytes"),
            "{}",
            answer.body
        );
    }
    assert!(early.starts_with("HTTP/1.1 413"), "{early}");
    server.stop().await.expect("no panic").expect("no failure");
}

/// Clients that announce large bodies hold only the memory that they have filled. The announced bodies would
/// take twice the memory, and none of them ends.
#[tokio::test]
async fn bodies_of_slow_clients_leave_memory_to_others() {
    let max_body = 2 << 20;
    let harness = harness(ServerOptions {
        body_memory: 16 << 20,
        max_body,
        body_timeout: Duration::from_secs(600),
        ..ServerOptions::default()
    });
    let server = Listening::start(harness.server).await;
    let address = server.address;
    let body = with_model(json!({"prompt": "a", "max_tokens": 1})).to_string();
    let spaces = " ".repeat(max_body - body.len());
    let body = body + &spaces;
    let sent = tokio::task::spawn_blocking(move || {
        let slow: Vec<TcpStream> = (0..8)
            .map(|_| {
                let mut slow = connect(address);
                let request = headers(body.len(), "") + &body[..300 << 10];
                slow.write_all(request.as_bytes())
                    .expect("the server reads");
                slow
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        let whole = headers(body.len(), "") + &body;
        let statuses: Vec<u16> = (0..3)
            .map(|_| exchange(address, whole.as_bytes()).status)
            .collect();
        drop(slow);
        statuses
    });
    assert_eq!(sent.await.expect("no panic"), [200; 3]);
    server.stop().await.expect("no panic").expect("no failure");
}

/// Two bodies together exceed the memory, so the second one waits until the first one has been prepared.
#[tokio::test]
async fn bodies_wait_for_the_memory_of_others() {
    let harness = harness(ServerOptions {
        body_memory: 1 << 20,
        body_timeout: Duration::from_secs(120),
        ..ServerOptions::default()
    });
    let server = Listening::start(harness.server).await;
    let address = server.address;
    let body = with_model(json!({"prompt": "a", "max_tokens": 1})).to_string();
    // Spaces are a valid part of the body.
    let body = body + &" ".repeat(400 << 10);
    let sent = tokio::task::spawn_blocking(move || {
        // The first request reserves memory with its first 256 KiB.
        let mut first = connect(address);
        let (begin, end) = body.split_at(300 << 10);
        let request = headers(body.len(), "") + begin;
        first
            .write_all(request.as_bytes())
            .expect("the server reads");
        let whole = headers(body.len(), "") + &body;
        let small = with_model(json!({"prompt": "a", "max_tokens": 1})).to_string();
        std::thread::sleep(Duration::from_millis(200));
        let second = std::thread::spawn(move || exchange(address, whole.as_bytes()));
        std::thread::sleep(Duration::from_millis(200));
        assert!(!second.is_finished(), "the second body waits for memory");
        // A small body needs no memory.
        let small = headers(small.len(), "") + &small;
        let small = exchange(address, small.as_bytes());
        first.write_all(end.as_bytes()).expect("the server reads");
        let mut answer = String::new();
        first
            .read_to_string(&mut answer)
            .expect("the server answers");
        let second = second.join().expect("no panic");
        [
            small.status.to_string(),
            second.status.to_string(),
            answer[9..12].to_owned(),
        ]
    });
    let statuses = sent.await.expect("no panic");
    assert_eq!(statuses, ["200", "200", "200"]);
    server.stop().await.expect("no panic").expect("no failure");
}
