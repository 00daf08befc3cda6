//! Tests malformed images: each gets a clear error in the form of its API, without the data of the image.

use crate::harness::{Harness, user, with_model};
use crate::malformed_fields::checked;
use crate::pictures::{base64, data_url, image_url, model, png};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::EngineOptions;
use serde_json::{Value, json};

/// Malformed image files in base64. The names say what is wrong.
fn files() -> Vec<(String, String)> {
    let whole = png(40, 30, 1, None);
    let mut files: Vec<(String, Vec<u8>)> = vec![
        ("one byte".into(), vec![0]),
        (
            "text".into(),
            b"<svg xmlns='http://www.w3.org/2000/svg'/>".to_vec(),
        ),
        (
            "gif".into(),
            b"GIF89a\x01\x00\x01\x00\x00\x00\x00;".to_vec(),
        ),
        ("bmp".into(), b"BM0000000000000000".to_vec()),
        ("tiff".into(), b"II*\x00\x08\x00\x00\x00".to_vec()),
        ("jpeg start".into(), b"\xff\xd8\xff\xe0".to_vec()),
        (
            "webp start".into(),
            b"RIFF\x00\x01\x00\x00WEBPVP8 ".to_vec(),
        ),
        ("zeros".into(), vec![0; 5000]),
    ];
    for length in (8..whole.len() - 12).step_by(whole.len() / 20) {
        files.push((
            format!("{length} bytes of a PNG file"),
            whole[..length].to_vec(),
        ));
    }
    for position in (12..whole.len() - 16).step_by(whole.len() / 20) {
        // A changed byte breaks a checksum.
        let mut changed = whole.clone();
        changed[position] ^= 0x40;
        files.push((format!("changed byte {position}"), changed));
    }
    let files = files.into_iter();
    files.map(|(name, bytes)| (name, base64(&bytes))).collect()
}

/// Parts of chat completions that are malformed outside of the image's file, with words of the error.
fn parts() -> Vec<(Value, &'static str)> {
    let long = "QUJD".repeat(2000);
    let good = data_url(&png(3, 2, 1, None));
    let url = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    vec![
        (json!({"type": "image_url"}), "image_url: is missing"),
        (
            json!({"type": "image_url", "image_url": null}),
            "image_url: is missing",
        ),
        (
            json!({"type": "image_url", "image_url": good}),
            "expected an object",
        ),
        (
            json!({"type": "image_url", "image_url": 5}),
            "expected an object",
        ),
        (
            json!({"type": "image_url", "image_url": [good]}),
            "expected an object",
        ),
        (
            json!({"type": "image_url", "image_url": {}}),
            "url: is missing",
        ),
        (
            json!({"type": "image_url", "image_url": {"url": null}}),
            "url: is missing",
        ),
        (
            json!({"type": "image_url", "image_url": {"url": 7}}),
            "url: expected a text",
        ),
        (
            json!({"type": "image_url", "image_url": {"url": [good]}}),
            "url: expected a text",
        ),
        (
            json!({"type": "image_url", "image_url": {"url": good, "size": 1}}),
            "unknown field \"size\"",
        ),
        (
            json!({"type": "image_url", "image_url": {"url": good, "detail": "best"}}),
            "image_url.detail: is \"best\"",
        ),
        (
            json!({"type": "image_url", "image_url": {"url": good, "detail": 3}}),
            "detail: expected a text",
        ),
        (
            json!({"type": "image_url", "image_url": {"url": good, "detail": long}}),
            "detail",
        ),
        (json!({"type": "image", "source": {}}), "type: is \"image\""),
        (
            json!({"type": "text", "text": "a", "image_url": {"url": good}}),
            "image_url: is in a part of the type \"text\"",
        ),
        (
            json!({"type": "text", "text": "a", "file_id": "a"}),
            "file_id: is in a part",
        ),
        (
            json!({"type": "text", "text": "a", "source": {}}),
            "source: is in a part",
        ),
        (json!({"type": "input_image"}), "image_url: is missing"),
        (
            json!({"type": "input_image", "image_url": {"url": good}}),
            "expected a text",
        ),
        (
            json!({"type": "input_image", "file_id": "a"}),
            "stores no files",
        ),
        (
            json!({"type": "IMAGE_URL", "image_url": {"url": good}}),
            "type: is",
        ),
        (url(""), "--media-root"),
        (url("cat.png"), "--media-root"),
        (url("/etc/passwd"), "--media-root"),
        (url("../../etc/passwd"), "--media-root"),
        (url("file:///etc/passwd"), "--media-root"),
        (url("file://host/a.png"), "another machine"),
        (url("http://127.0.0.1:1/a.png"), "nothing from the network"),
        (url("https://example.com/a.png"), "nothing from the network"),
        (url("ftp://example.com/a.png"), "scheme \"ftp\""),
        (url("javascript:alert(1)"), "scheme \"javascript\""),
        (url("data:"), "without a comma"),
        (url("data:,"), "without base64"),
        (url("data:image/png,abc"), "without base64"),
        (url("data:image/png;base64"), "without a comma"),
        (url("data:image/png;base64,"), "has no data"),
        (url("data:image/png;base64,===="), "not base64"),
        (url("data:image/png;base64,a\u{e9}"), "not base64"),
        (url("data:image/png;base64,AA\nAA"), "not base64"),
        (
            url("data:image/gif;base64,R0lG"),
            "media type \"image/gif\"",
        ),
        (
            url("data:text/plain;base64,YWJj"),
            "media type \"text/plain\"",
        ),
        (url("data:;base64,YWJj"), "media type \"\""),
        (url(&format!("data:{long};base64,YWJj")), "media type"),
        (url(&format!("{long}:")), "scheme"),
        (url(&long), "--media-root"),
    ]
}

/// Values of the field `source` of Anthropic's image blocks, with words of the error.
fn sources() -> Vec<(Value, &'static str)> {
    let data = base64(&png(3, 2, 1, None));
    let long = "QUJD".repeat(2000);
    vec![
        (json!(null), "source: is missing"),
        (json!("a"), "source: expected an object"),
        (json!(long), "source: expected an object"),
        (json!({}), "type: is missing"),
        (json!({"type": 5}), "type: expected a text"),
        (
            json!({"type": "url", "url": "https://example.com/a.png"}),
            "nothing from the network",
        ),
        (json!({"type": "file", "file_id": "a"}), "stores no files"),
        (json!({"type": long}), "expected \"base64\""),
        (json!({"type": "base64"}), "media_type: is missing"),
        (
            json!({"type": "base64", "media_type": "image/png"}),
            "data: is missing",
        ),
        (
            json!({"type": "base64", "media_type": "image/png", "data": null}),
            "data: is missing",
        ),
        (
            json!({"type": "base64", "media_type": "image/png", "data": [1]}),
            "data: expected a text",
        ),
        (
            json!({"type": "base64", "media_type": "image/png", "data": ""}),
            "has no data",
        ),
        (
            json!({"type": "base64", "media_type": "image/png", "data": "*"}),
            "not base64",
        ),
        (
            json!({"type": "base64", "media_type": "image/gif", "data": data}),
            "image/gif",
        ),
        (
            json!({"type": "base64", "media_type": "", "data": data}),
            "media type",
        ),
        (
            json!({"type": "base64", "media_type": long, "data": data}),
            "media type",
        ),
        (
            json!({"type": "base64", "data": data}),
            "media_type: is missing",
        ),
        (
            json!({"type": "base64", "media_type": "image/png", "data": data, "url": "http://a"}),
            "unknown field \"url\"",
        ),
    ]
}

/// Sends a malformed request, and checks its error. Returns the error's message.
async fn check(harness: &Harness, path: &str, body: Value, what: &str) -> String {
    let answer = harness.post(path, &with_model(body)).await;
    assert_eq!(answer.status, 400, "{path} {what}: {}", answer.text);
    let message = checked(path, &answer);
    assert!(message.len() < 400, "{path} {what}: {message}");
    assert!(
        !message.contains(&"QUJD".repeat(12)),
        "{path} {what}: {message}"
    );
    message
}

fn chat(part: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
}

fn block(source: &Value) -> Value {
    chat(&json!({"type": "image", "source": source}))
}

#[tokio::test]
async fn malformed_images_are_refused_with_the_field_at_fault() {
    let models = vec![model("vision-ple")];
    let harness = Harness::of_models(
        models,
        EngineOptions::default(),
        ServerOptions::default(),
        None,
    );
    let good = chat(&image_url(&png(30, 30, 1, None)));
    harness.chat(good.clone()).await.ok();
    let (chat_path, messages, responses) =
        ("/v1/chat/completions", "/v1/messages", "/v1/responses");
    let mut count = 0;
    for (name, data) in files() {
        let url = format!("data:image/png;base64,{data}");
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        let found = [
            check(&harness, chat_path, chat(&part), &name).await,
            check(&harness, messages, block(&json!({"type": "base64", "media_type": "image/png", "data": data})), &name)
                .await,
            check(
                &harness,
                responses,
                json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
                &name,
            )
            .await,
        ];
        for (message, field) in found
            .iter()
            .zip(["image_url.url: ", "source: ", "image_url: "])
        {
            assert!(message.contains(field), "{name}: {message}");
            let is_clear =
                message.contains("PNG, JPEG or WebP") || message.contains("cannot be decoded");
            assert!(is_clear, "{name}: {message}");
        }
        count += found.len();
    }
    for (part, words) in parts() {
        let message = check(&harness, chat_path, chat(&part), words).await;
        assert!(message.starts_with("messages[0].content[0]."), "{message}");
        assert!(message.contains(words), "{words}: {message}");
        count += 1;
    }
    for (source, words) in sources() {
        let message = check(&harness, messages, block(&source), words).await;
        assert!(message.starts_with("messages[0].content[0]."), "{message}");
        assert!(message.contains(words), "{words}: {message}");
        count += 1;
    }
    assert!(count > 100, "{count}");
    // Fields of other types may hold an image by mistake. The parser's error quotes such a value.
    let long = "QUJD".repeat(2000);
    for (path, body) in [
        (
            chat_path,
            json!({"messages": user("x"), "max_tokens": long}),
        ),
        (chat_path, json!({"messages": long})),
        (
            chat_path,
            json!({"messages": [{"role": long, "content": "x"}]}),
        ),
        (messages, json!({"messages": user("x"), "max_tokens": long})),
        (
            messages,
            json!({"messages": [{"role": "user", "content": [{"type": long}]}], "max_tokens": 1}),
        ),
        (responses, json!({"input": "x", "max_output_tokens": long})),
    ] {
        check(&harness, path, body, "long value").await;
    }
    harness.chat(good).await.ok();
    assert_eq!(harness.metric("gemma4_queued_requests").await, 0.0);
}
