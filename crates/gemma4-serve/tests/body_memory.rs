//! Tests that the bodies of requests take no more memory than the server's option says, with all their values. The test
//! is a program of its own, because it counts the memory of the whole process.

#[path = "serve/harness.rs"]
#[allow(dead_code, reason = "the other tests use more of it")]
mod harness;

use axum::body::Body;
use axum::http::Request;
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use harness::{Harness, MODEL};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

#[global_allocator]
static ALLOCATOR: Counted = Counted;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, with a count of the allocated bytes.
struct Counted;

fn count(size: usize) {
    let now = ALLOCATED.fetch_add(size, Ordering::Relaxed) + size;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: every block comes from the system allocator, and counting the bytes does not touch the blocks.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

/// The memory of bodies in the test.
const BODY_MEMORY: usize = 32 << 20;

/// The memory for other things, such as the answer.
const REST: usize = 2 << 20;

/// Returns `count` numbered copies of `one`, in which `#` becomes the number, with commas between them.
fn list(one: &str, count: usize) -> String {
    let copies: Vec<String> = (0..count)
        .map(|number| one.replace('#', &number.to_string()))
        .collect();
    copies.join(",")
}

/// The paths and bodies of requests with `@` in the place of a list, and the element of the list.
const BODIES: [(&str, &str, &str); 19] = [
    (
        "/v1/chat/completions",
        r#""messages":[{"role":"user","content":[@]}]"#,
        r#"{"type":""}"#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[{"role":"user","content":[@]}]"#,
        r#"{"type":"text","text":""}"#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[{"role":"user","content":[@]}]"#,
        r#"{"type":"","image_url":{"url":""},"source":{}}"#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[@]"#,
        r#"{"role":""}"#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[@]"#,
        r#"{"role":"user","content":""}"#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[@]"#,
        r#"{"role":"","content":[{"type":""}]}"#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[{"role":"assistant","tool_calls":[@]}]"#,
        r#"{"id":"","function":{"name":"","arguments":"{}"}}"#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[],"metadata":[@]"#,
        "0",
    ),
    (
        "/v1/chat/completions",
        r#""messages":[],"metadata":[@]"#,
        "[]",
    ),
    (
        "/v1/chat/completions",
        r#""messages":[],"metadata":{@}"#,
        r##""#":0"##,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[],"logit_bias":{@}"#,
        r##""#":0"##,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[],"stop":[@]"#,
        r#""""#,
    ),
    (
        "/v1/chat/completions",
        r#""messages":[],"tools":[@]"#,
        r#"{"type":""}"#,
    ),
    ("/v1/completions", r#""prompt":[@]"#, r#""""#),
    ("/v1/completions", r#""prompt":[@]"#, "0"),
    ("/v1/responses", r#""input":[@]"#, r#"{"type":""}"#),
    (
        "/v1/responses",
        r#""input":[@]"#,
        r#"{"role":"","content":[{"type":""}]}"#,
    ),
    (
        "/v1/messages",
        r#""max_tokens":1,"messages":[{"role":"user","content":[@]}]"#,
        r#"{"type":""}"#,
    ),
    (
        "/v1/messages",
        r#""max_tokens":1,"messages":[@]"#,
        r#"{"role":"","content":""}"#,
    ),
];

#[tokio::test]
async fn bodies_take_no_more_memory_than_the_option_says() {
    let options = ServerOptions {
        body_memory: BODY_MEMORY,
        max_body: 16 << 20,
        ..ServerOptions::default()
    };
    let harness = Harness::new(EngineOptions::default(), options);
    for (path, frame, element) in BODIES {
        let mut count = 4 << 20;
        loop {
            let body = frame.replace('@', &list(element, count / element.len()));
            let body = format!("{{\"model\":\"{MODEL}\",{body}}}");
            let before = ALLOCATED.load(Ordering::Relaxed);
            PEAK.store(before, Ordering::Relaxed);
            let length = body.len();
            let request = Request::post(path).header("content-type", "application/json");
            let request = request
                .body(Body::from(body))
                .expect("the request is valid");
            let answer = harness.send(request).await;
            let peak = PEAK.load(Ordering::Relaxed) - before;
            assert!(
                peak < BODY_MEMORY + REST,
                "{path} {frame} {element}: {peak} bytes for {length}"
            );
            if answer.status != 413 {
                println!("{path} {frame} {element}: {peak} bytes for {length}");
                let is_parsed = [200, 400].contains(&answer.status.as_u16());
                assert!(is_parsed, "{}", answer.text);
                break;
            }
            assert!(answer.text.contains("with its values"), "{}", answer.text);
            count = count * 3 / 4;
        }
    }
}
