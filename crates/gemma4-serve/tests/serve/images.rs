//! Tests that images and other media which the server does not support are refused in the form of the request's API.

use crate::harness::{Harness, gemma, with_model};
use crate::pictures::{base64, image_url, model, png, text};
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::text::TextModel;
use gemma4_serve::{ImageOptions, MediaOptions, ServerOptions, run_batch_file};
use serde_json::{Map, Value, json};

fn content(part: Value) -> Value {
    json!([{"role": "user", "content": [text("a"), part]}])
}

/// Sends a request that must be refused. Returns the error's message.
async fn refused(harness: &Harness, path: &str, body: Value, status: u16) -> String {
    let answer = harness.post(path, &with_model(body)).await;
    assert_eq!(answer.status, status, "{path}: {}", answer.text);
    let json = answer.json();
    match path {
        "/v1/messages" => assert_eq!(json["type"], "error"),
        _ => assert!(json["error"].get("param").is_some(), "{path}: {json}"),
    }
    let message = json["error"]["message"].as_str().expect("a message");
    message.to_owned()
}

fn chat(part: Value) -> Value {
    json!({"messages": content(part), "max_tokens": 1})
}

#[tokio::test]
async fn model_without_vision_refuses_images_in_every_api() {
    let harness = Harness::plain();
    let file = png(3, 2, 1, None);
    let source = json!({"type": "base64", "media_type": "image/png", "data": base64(&file)});
    let url = crate::pictures::data_url(&file);
    for (path, body, field) in [
        (
            "/v1/chat/completions",
            chat(image_url(&file)),
            "messages[0].content[1].image_url.url",
        ),
        (
            "/v1/messages",
            json!({"max_tokens": 2, "messages": content(json!({"type": "image", "source": source}))}),
            "messages[0].content[1].source",
        ),
        (
            "/v1/responses",
            json!({"input": content(json!({"type": "input_image", "image_url": url}))}),
            "input[0].content[1].image_url",
        ),
    ] {
        let message = refused(&harness, path, body, 400).await;
        let expected =
            format!("{field}: this model sees no images: the embedded model has no vision");
        assert!(message.starts_with(&expected), "{path}: {message}");
    }
}

#[tokio::test]
async fn other_media_are_refused_by_name() {
    let harness = Harness::of_models(
        vec![model("vision-ple")],
        EngineOptions::default(),
        ServerOptions::default(),
        None,
    );
    let video = json!({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}});
    let file = json!({"type": "input_file", "file_id": "a"});
    let document = json!({"type": "document", "source": {"type": "text", "data": "a"}});
    for (path, body, words) in [
        (
            "/v1/chat/completions",
            chat(video),
            ["messages[0].content[1].type", "video_url"],
        ),
        (
            "/v1/completions",
            json!({"prompt": [image_url(&[])]}),
            ["prompt", ""],
        ),
        (
            "/v1/messages",
            chat(document),
            ["messages[0].content[1].type", "document"],
        ),
        (
            "/v1/responses",
            json!({"input": content(file)}),
            ["input[0].content[1].type", "input_file"],
        ),
    ] {
        let message = refused(&harness, path, body, 400).await;
        assert!(
            words.iter().all(|word| message.contains(word)),
            "{path}: {message}"
        );
    }
}

#[tokio::test]
async fn images_outside_of_user_messages_are_refused() {
    let image = image_url(&png(3, 2, 1, None));
    let harness = Harness::of_models(
        vec![model("vision-ple")],
        EngineOptions::default(),
        ServerOptions::default(),
        None,
    );
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}});
    for (messages, field) in [
        (
            json!([{"role": "system", "content": [image]}]),
            "messages[0].content[0].type",
        ),
        (
            json!([{"role": "assistant", "content": [image]}]),
            "messages[0].content[0].type",
        ),
        (
            json!([
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": [image]},
            ]),
            "messages[1].content[0].type",
        ),
    ] {
        let body = json!({"messages": messages});
        let message = refused(&harness, "/v1/chat/completions", body, 400).await;
        assert!(message.starts_with(field), "{message}");
        assert!(message.contains("has text only"), "{message}");
    }
    let source = json!({"type": "base64", "media_type": "image/png", "data": "AA=="});
    let body = json!({
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "image", "source": source}]},
        ],
        "max_tokens": 1,
    });
    let message = refused(&harness, "/v1/messages", body, 400).await;
    assert!(
        message.starts_with("messages[1].content[0].type"),
        "{message}"
    );
}

/// Creates a server with limits on images.
fn limited(images: ImageOptions) -> Harness {
    with_media(MediaOptions {
        images,
        ..MediaOptions::default()
    })
}

/// Creates a server with limits on images and audio.
fn with_media(media: MediaOptions) -> Harness {
    let options = ServerOptions {
        media,
        ..ServerOptions::default()
    };
    Harness::of_models(
        vec![model("vision-ple")],
        EngineOptions::default(),
        options,
        None,
    )
}

#[tokio::test]
async fn limits_of_images_are_enforced() {
    let path = "/v1/chat/completions";
    let usual = ImageOptions::default;
    let small = image_url(&png(10, 10, 1, None));
    let three = json!({"messages": [{"role": "user", "content": [small, small, small]}]});

    let harness = limited(ImageOptions {
        max_count: 2,
        ..usual()
    });
    let message = refused(&harness, path, three.clone(), 400).await;
    assert!(
        message.starts_with("messages[0].content[2].image_url.url: is image 3"),
        "{message}"
    );
    let harness = limited(ImageOptions {
        max_count: 0,
        ..usual()
    });
    let message = refused(&harness, path, three, 400).await;
    assert!(message.contains("expected at most 0 images"), "{message}");

    let file = png(100, 100, 1, None);
    let harness = limited(ImageOptions {
        max_bytes: file.len() - 1,
        ..usual()
    });
    let message = refused(&harness, path, chat(image_url(&file)), 400).await;
    let expected = format!(
        "has {} bytes; expected at most {}",
        file.len(),
        file.len() - 1
    );
    assert!(message.contains(&expected), "{message}");

    let harness = limited(ImageOptions {
        max_pixels: 9_999,
        ..usual()
    });
    let message = refused(&harness, path, chat(image_url(&file)), 400).await;
    assert!(
        message.contains("has 100 x 100 pixels; expected at most 9999"),
        "{message}"
    );

    // An image needs 6 bytes for each of its pixels to be decoded. Its 64 soft tokens of 6,912 bytes, the 115,200 bytes
    // after the first of two resizings, and 47,616 bytes of weights come on top.
    let limited = |bytes| {
        with_media(MediaOptions {
            memory: bytes,
            ..MediaOptions::default()
        })
    };
    let needed = 60_000 + 64 * 6912 + 115_200 + 47_616;
    let harness = limited(needed - 1);
    let message = refused(&harness, path, chat(image_url(&file)), 400).await;
    assert!(message.contains("needs 1 MiB to be decoded"), "{message}");
    let harness = limited(needed);
    for _ in 0..3 {
        let answer = harness
            .post(path, &with_model(chat(image_url(&file))))
            .await;
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
    // The memory decodes one image after the other, but two resized images never fit in it.
    let part = image_url(&file);
    let two = json!({"messages": [{"role": "user", "content": [part, part]}], "max_tokens": 1});
    let message = refused(&harness, path, two, 400).await;
    let words = "messages[0].content[1].image_url.url: needs 1 MiB of memory";
    assert!(message.starts_with(words), "{message}");
}

#[tokio::test]
async fn prompt_whose_images_exceed_the_context_is_refused() {
    let engine = EngineOptions {
        context: 150,
        ..EngineOptions::default()
    };
    let models = vec![model("vision-ple")];
    let harness = Harness::of_models(models, engine, ServerOptions::default(), None);
    let image = image_url(&png(10, 10, 1, None));
    let body = |count: usize| {
        let content = vec![image.clone(); count];
        json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1})
    };
    let path = "/v1/chat/completions";
    harness.post(path, &with_model(body(1))).await.ok();
    let answer = harness.post(path, &with_model(body(3))).await;
    assert_eq!(answer.status, 400, "{}", answer.text);
    assert_eq!(answer.json()["error"]["code"], "context_length_exceeded");
}

#[test]
fn batch_file_with_image_has_an_error_in_its_line() {
    let content = json!([text("a"), image_url(&png(3, 2, 1, None))]);
    let lines = [
        json!({"messages": [{"role": "user", "content": content}]}),
        json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ];
    let input: String = lines.iter().map(|line| format!("{line}\n")).collect();
    let mut output = Vec::new();
    let counts = run_batch_file(
        gemma(),
        EngineOptions::default(),
        MediaOptions::default(),
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
        refused.contains("sees no images") && refused.contains("400"),
        "{refused}"
    );
}

/// The memory holds one resized image, and the lines with images are answered at the same time.
#[test]
fn batch_file_with_more_images_than_memory_answers_all_lines() {
    let file = png(100, 100, 1, None);
    let lines = (0..12).map(|_| {
        let content = json!([image_url(&file), text("a")]);
        let line = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 2});
        format!("{line}\n")
    });
    let (input, mut output) = (lines.collect::<String>(), Vec::new());
    let media = MediaOptions {
        memory: 700 << 10,
        ..MediaOptions::default()
    };
    let counts = run_batch_file(
        model("vision-ple"),
        EngineOptions::default(),
        media,
        input.as_bytes(),
        &mut output,
        &Map::new(),
        || false,
    );
    let counts = counts.expect("the engine works");
    assert_eq!((counts.answered, counts.failed), (12, 0));
}

#[test]
fn text_prompt_with_placeholder_is_refused() {
    let model = TextModel::new(&model("vision-unified"));
    for medium in ["image", "audio", "video"] {
        let error = model
            .text_prompt(&format!("a <|{medium}|>"))
            .expect_err("the placeholder is refused");
        assert!(error.to_string().contains(medium), "{error}");
    }
    model.text_prompt("a").expect("the text has no placeholder");
}
