//! Tests that requests with images, audio or video are refused in the form of their API, because the server reads text
//! only.

use crate::harness::{Harness, gemma, with_model};
use burn::tensor::Device;
use burn_gemma4::Gemma4;
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::run_batch_file;
use gemma4_serve::text::TextModel;
use serde_json::{Map, Value, json};

/// A part with an image, as in OpenAI's chat completions.
fn image_url() -> Value {
    json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}})
}

#[tokio::test]
async fn request_with_image_is_refused_by_every_api() {
    let harness = Harness::plain();
    let message =
        |part: Value| json!([{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]);
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AA=="});
    let input = json!({"type": "input_image", "image_url": "data:image/png;base64,AA=="});
    let audio = json!({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}});
    for (path, body, words) in [
        (
            "/v1/chat/completions",
            json!({"messages": message(image_url())}),
            ["messages[0].content[1].type", "image_url"],
        ),
        (
            "/v1/chat/completions",
            json!({"messages": message(audio)}),
            ["messages[0].content[1].type", "input_audio"],
        ),
        (
            "/v1/completions",
            json!({"prompt": [image_url()]}),
            ["prompt", ""],
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 2, "messages": message(json!({"type": "image", "source": source}))}),
            ["messages[0].content[1]", "image"],
        ),
        (
            "/v1/responses",
            json!({"input": message(input)}),
            ["input", "input_image"],
        ),
    ] {
        let answer = harness.post(path, &with_model(body)).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.text);
        let json = answer.json();
        let error = json["error"]["message"].as_str().expect("a message");
        assert!(
            words.iter().all(|word| error.contains(word)),
            "{path}: {error}"
        );
        match path {
            "/v1/messages" => assert_eq!(json["error"]["type"], "invalid_request_error"),
            _ => assert!(json["error"].get("param").is_some(), "{path}: {json}"),
        }
    }
}

#[test]
fn batch_file_with_image_has_an_error_in_its_line() {
    let content = json!([{"type": "text", "text": "a"}, image_url()]);
    let lines = [
        json!({"messages": [{"role": "user", "content": content}]}),
        json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ];
    let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let mut output = Vec::new();
    let options = EngineOptions::default();
    let counts = run_batch_file(
        gemma(),
        options,
        input.as_bytes(),
        &mut output,
        &Map::new(),
        || false,
    );
    let counts = counts.expect("the engine works");
    assert_eq!((counts.answered, counts.failed), (1, 1));
    let output = String::from_utf8(output).expect("UTF-8");
    let refused = output.lines().next().expect("a line for each request");
    assert!(
        refused.contains("image_url") && refused.contains("400"),
        "{refused}"
    );
}

#[test]
fn text_prompt_with_placeholder_is_refused() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/fixtures/vision-unified"
    );
    let gemma = Gemma4::from_pretrained(folder, &Device::flex()).expect("the fixture is loadable");
    let model = TextModel::new(&gemma);
    for medium in ["image", "audio", "video"] {
        let error = model
            .text_prompt(&format!("a <|{medium}|>"))
            .expect_err("the placeholder is refused");
        assert!(error.to_string().contains(medium), "{error}");
    }
    model.text_prompt("a").expect("the text has no placeholder");
}
