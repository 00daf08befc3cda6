//! Tests that answers about images equal those of `Gemma4::generate` with the same images, through all APIs.

use crate::conversations::{Case, TOKENS, body, case, check, harness};
use crate::harness::{Harness, with_model};
use crate::pictures::{ALL, base64, data_url, image_url, model, png, text};
use burn_gemma4::{ChatTemplate, Gemma4, Message};
use futures_util::future::join_all;
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::{MediaOptions, ServerOptions, run_batch_file};
use serde_json::{Map, Value, json};

fn files() -> Vec<Vec<u8>> {
    vec![
        png(131, 67, 1, None),
        png(53, 97, 2, None),
        png(131, 67, 1, Some((100, 40))),
    ]
}

fn cases(gemma: &Gemma4, files: &[Vec<u8>]) -> Vec<Case> {
    let question = json!({"text": "what is this?"});
    let turns = [
        vec![json!([{"image": 0}, question])],
        vec![json!([{"text": "what is a lynx?"}])],
        vec![json!([{"image": 2}, question])],
        vec![
            json!([{"image": 0}, question]),
            json!([{"text": "a red disc"}]),
            json!([{"text": "and in"}, {"image": 1}, {"text": "the other one?"}]),
        ],
        vec![json!([{"image": 1}, {"image": 0}])],
        vec![json!([{"text": "look"}, {"image": 1}, {"image": 1}, question])],
    ];
    turns
        .iter()
        .map(|turns| case(gemma, turns, files))
        .collect()
}

#[tokio::test]
async fn answers_equal_generate_with_and_without_prefix_cache_for_any_chunk() {
    for name in ALL {
        let cases = cases(&model(name), &files());
        for (chunk, prefix_cache_bytes) in [
            (None, 0),
            (None, 64 << 20),
            (Some(1), 0),
            (Some(50), 64 << 20),
        ] {
            let engine = EngineOptions {
                prefill_chunk: chunk,
                prefix_cache_bytes,
                ..EngineOptions::default()
            };
            let harness = harness(name, engine);
            for round in 0..3 {
                for (index, case) in cases.iter().enumerate() {
                    let what = format!("{name} {chunk:?} {prefix_cache_bytes} {index} {round}");
                    let cached = check(&harness, case, &what).await;
                    match (prefix_cache_bytes, round) {
                        (0, _) => assert_eq!(cached, 0, "{what}"),
                        // A prompt that is longer than the window takes a checkpoint when it is repeated.
                        (_, 2) => assert!(cached >= 16, "{what}: {cached}"),
                        _ => (),
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn batched_answers_with_and_without_images_equal_generate() {
    for name in ALL {
        let cases = cases(&model(name), &files());
        for prefix_cache_bytes in [0, 64 << 20] {
            let engine = EngineOptions {
                prefill_chunk: Some(40),
                prefix_cache_bytes,
                load_vision: true,
                ..EngineOptions::default()
            };
            let harness = harness(name, engine);
            let all = cases.iter().cycle().take(3 * cases.len()).enumerate();
            join_all(all.map(async |(index, case)| {
                check(
                    &harness,
                    case,
                    &format!("{name} {prefix_cache_bytes} {index}"),
                )
                .await
            }))
            .await;
        }
    }
}

/// The prompts have the same tokens, and the images differ in one pixel. The question is long, so that its tokens would
/// be worth sharing.
#[tokio::test]
async fn images_that_differ_in_one_pixel_share_only_the_tokens_before_them() {
    for name in ALL {
        let gemma = model(name);
        let begin = "Look at this picture for as long as you need, and tell me what it shows.";
        let turns =
            |image: usize| vec![json!([{"text": begin}, {"image": image}, {"text": begin}])];
        let cases = [0, 2].map(|image| case(&gemma, &turns(image), &files()));
        let before = gemma
            .tokens(
                &vec![Message::user(begin)].into(),
                gemma.chat_options().chat,
            )
            .expect("the prompt is valid")
            .len();
        let harness = harness(name, EngineOptions::default());
        let length = cases[0].prompt_tokens;
        assert_eq!(check(&harness, &cases[0], name).await, 0);
        assert_eq!(check(&harness, &cases[0], name).await, length - 1);
        let shared = check(&harness, &cases[1], name).await;
        assert!(shared < before, "{name}: {shared} of {before}");
        assert_eq!(check(&harness, &cases[1], name).await, length - 1);
        assert_eq!(check(&harness, &cases[0], name).await, length - 1);
    }
}

#[tokio::test]
async fn answers_of_every_api_equal_generate() {
    let file = png(90, 60, 3, None);
    let gemma = model("vision-keqv");
    let turns = [json!([{"text": "see"}, {"image": 0}, {"text": "what is this?"}])];
    let expected = case(&gemma, &turns, std::slice::from_ref(&file));
    let harness = harness("vision-keqv", EngineOptions::default());
    let source = json!({"type": "base64", "media_type": "image/png", "data": base64(&file)});
    let blocks = json!([text("see"), {"type": "image", "source": source}, text("what is this?")]);
    let message = harness
        .messages(json!({
            "messages": [{"role": "user", "content": blocks}], "max_tokens": TOKENS, "temperature": 0,
        }))
        .await
        .ok();
    let whole: String = message["content"]
        .as_array()
        .expect("blocks")
        .iter()
        .filter_map(|block| block["text"].as_str())
        .collect();
    assert_eq!(whole, expected.answer);
    assert_eq!(message["usage"]["input_tokens"], expected.prompt_tokens);
    let count = json!({"messages": [{"role": "user", "content": blocks}]});
    let count = harness
        .post("/v1/messages/count_tokens", &with_model(count))
        .await
        .ok();
    assert_eq!(count["input_tokens"], expected.prompt_tokens);

    let input = json!([{"role": "user", "content": [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": data_url(&file), "detail": "auto"},
        {"type": "input_text", "text": "what is this?"},
    ]}]);
    let asked = with_model(json!({"input": input, "max_output_tokens": TOKENS, "temperature": 0}));
    let response = harness.post("/v1/responses", &asked).await.ok();
    assert_eq!(
        response["output"][0]["content"][0]["text"],
        expected.answer.as_str()
    );
    assert_eq!(response["usage"]["input_tokens"], expected.prompt_tokens);

    let mut body = body(&expected);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let chunks = harness.post("/v1/chat/completions", &body).await.chunks();
    let deltas = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert_eq!(deltas.collect::<String>(), expected.answer);
    let usage = &chunks.last().expect("chunks")["usage"];
    assert_eq!(usage["prompt_tokens"], expected.prompt_tokens);
}

#[tokio::test]
async fn detail_sets_the_number_of_soft_tokens() {
    let harness = harness("vision-unified", EngineOptions::default());
    let send = async |detail: &str| {
        let url = data_url(&png(48, 48, 1, None));
        let part = json!({"type": "image_url", "image_url": {"url": url, "detail": detail}});
        let messages = json!([{"role": "user", "content": [part]}]);
        harness
            .chat(json!({"messages": messages, "max_tokens": 1}))
            .await
    };
    // The checkpoint's own number is 70, as that of the detail `low`.
    let [low, auto] = [send("low").await.ok(), send("auto").await.ok()];
    assert_eq!(
        low["usage"]["prompt_tokens"],
        auto["usage"]["prompt_tokens"]
    );
    // The detail `high` gives 33 x 33 soft tokens, which exceed the context of the fixture.
    let high = send("high").await;
    assert_eq!(high.status, 400, "{}", high.text);
    assert!(
        high.text.contains("the prompt has at least 1106"),
        "{}",
        high.text
    );
}

/// The checkpoint's number of soft tokens fits, and that of the detail `high` exceeds the 96 columns of the model.
#[tokio::test]
async fn detail_that_does_not_fit_is_named() {
    let harness = harness("vision-unified", EngineOptions::default());
    let url = data_url(&png(1000, 10, 1, None));
    let chat = json!({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}},
    ]}]});
    let responses = json!({"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": url, "detail": "high"},
    ]}]});
    for (path, body, field) in [
        (
            "/v1/chat/completions",
            chat,
            "messages[0].content[0].image_url.detail",
        ),
        ("/v1/responses", responses, "input[0].content[0].detail"),
    ] {
        let answer = harness.post(path, &with_model(body)).await;
        assert_eq!(answer.status, 400, "{}", answer.text);
        let error = &answer.json()["error"];
        assert_eq!(error["param"], field, "{error}");
        let message = error["message"].as_str().expect("a message");
        assert!(
            message.starts_with(&format!("{field}: becomes 334 x 3")),
            "{message}"
        );
    }
}

#[tokio::test]
async fn images_of_tool_results_reach_the_model() {
    let template = "{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}\n\
        {% if message.content is string %}{{ message.content }}{% else %}\
        {% for part in message.content %}{{ part.text if part.type == 'text' else '<|image|>' }}{% endfor %}\
        {% endif %}{% for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{}\
        <tool_call|>{% endfor %}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}<turn|>\n\
        {% endfor %}<|turn>model\n";
    let template = ChatTemplate::from_source(template).expect("the template parses");
    let models = vec![model("vision-ple")];
    let options = ServerOptions::default();
    let harness = Harness::of_models(models, EngineOptions::default(), options, Some(template));
    let mut found = Vec::new();
    for seed in 0..2 {
        let file = png(60, 60, seed, None);
        let source = json!({"type": "base64", "media_type": "image/png", "data": base64(&file)});
        let result = json!([text("shot"), {"type": "image", "source": source}]);
        let message = harness
            .messages(json!({"messages": [
                {"role": "user", "content": "take a picture"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "camera", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": result}]},
            ], "max_tokens": TOKENS, "temperature": 0}))
            .await
            .ok();
        let response = harness
            .post(
                "/v1/responses",
                &with_model(json!({"input": [
                {"role": "user", "content": "take a picture"},
                {"type": "function_call", "call_id": "a", "name": "camera", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": [
                    {"type": "input_text", "text": "shot"},
                    {"type": "input_image", "image_url": data_url(&file)},
                ]},
            ], "max_output_tokens": TOKENS, "temperature": 0})),
            )
            .await
            .ok();
        let usage = &message["usage"];
        let tokens = usage["input_tokens"].as_u64().expect("a number")
            + usage["cache_read_input_tokens"].as_u64().expect("a number");
        assert!(tokens > 64, "{usage}");
        assert_eq!(response["usage"]["input_tokens"], tokens);
        // Both requests have the same prompt, so the second one reuses all of it.
        assert_eq!(
            response["usage"]["input_tokens_details"]["cached_tokens"],
            tokens - 1
        );
        found.push(usage["cache_read_input_tokens"].as_u64().expect("a number"));
    }
    // The second image shares only the tokens before it.
    assert!(found[1] < 60, "{found:?}");
}

#[tokio::test]
async fn template_that_shows_no_images_of_tool_results_is_an_error() {
    let template = ChatTemplate::from_source("{{ bos_token }}{{ messages | length }}");
    let template = template.expect("the template parses");
    let options = ServerOptions::default();
    let models = vec![model("vision-ple")];
    let harness = Harness::of_models(models, EngineOptions::default(), options, Some(template));
    let content = [image_url(&png(60, 60, 1, None))];
    let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
    let answer = harness.chat(body).await;
    assert_eq!(answer.status, 400, "{}", answer.text);
    let message = answer.json()["error"]["message"].clone();
    let message = message.as_str().expect("a message").to_owned();
    assert!(
        message.contains("0 image placeholders, but 1 images"),
        "{message}"
    );
}

#[test]
fn batch_file_reads_images_from_data_urls_and_files() {
    let gemma = model("vision-ple");
    let file = png(80, 50, 4, None);
    let expected = case(
        &gemma,
        &[json!([{"image": 0}, {"text": "what is this?"}])],
        std::slice::from_ref(&file),
    );
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("a picture.png"), &file).expect("a file");
    let absolute = format!("file://{}/a%20picture.png", folder.path().display());
    let urls = [
        data_url(&file),
        "a picture.png".into(),
        absolute,
        "../a.png".into(),
    ];
    let lines = urls.iter().map(|url| {
        let content =
            json!([{"type": "image_url", "image_url": {"url": url}}, text("what is this?")]);
        let body = json!({"messages": [{"role": "user", "content": content}]});
        format!("{}\n", json!({"url": "/v1/chat/completions", "body": body}))
    });
    let defaults = json!({"temperature": 0, "max_tokens": TOKENS});
    let defaults: Map<String, Value> = defaults.as_object().cloned().expect("an object");
    let media = MediaOptions {
        root: Some(folder.path().into()),
        ..MediaOptions::default()
    };
    let (input, mut output) = (lines.collect::<String>(), Vec::new());
    let engine = EngineOptions::default();
    let counts = run_batch_file(
        gemma,
        engine,
        media,
        input.as_bytes(),
        &mut output,
        &defaults,
        || false,
    );
    let counts = counts.expect("the engine works");
    assert_eq!((counts.answered, counts.failed), (3, 1));
    assert_eq!(counts.prompt_tokens, 3 * expected.prompt_tokens as u64);
    let output = String::from_utf8(output).expect("UTF-8");
    let lines: Vec<Value> = output
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    for line in &lines[..3] {
        let message = &line["response"]["body"]["choices"][0]["message"];
        assert_eq!(
            message["content"].as_str().unwrap_or_default(),
            expected.answer
        );
    }
    assert!(
        lines[3]
            .to_string()
            .contains("cannot be read in the folder of media")
    );
}
