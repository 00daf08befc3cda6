//! Tests malformed audio: each request gets a clear error in the form of its API, without the data of the clip.

use crate::harness::{Harness, with_model};
use crate::malformed_fields::checked;
use crate::pictures::{base64, clip, image_url, input_audio, model, png, wav};
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::{AudioOptions, MediaOptions, ServerOptions};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn hearing(media: MediaOptions, engine: EngineOptions) -> Harness {
    let options = ServerOptions {
        media,
        ..ServerOptions::default()
    };
    Harness::of_models(vec![model("audio-ple")], engine, options, None)
}

fn chat(part: &Value) -> Value {
    json!({"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
}

/// Sends a request that must be refused. Returns the error's message.
async fn refused(harness: &Harness, path: &str, body: Value, status: u16) -> String {
    let answer = harness.post(path, &with_model(body)).await;
    assert_eq!(answer.status, status, "{path}: {}", answer.text);
    let message = checked(path, &answer);
    assert!(message.len() < 400, "{message}");
    assert!(!message.contains(&"QUJD".repeat(12)), "{message}");
    message
}

/// Malformed audio files, with words of the error.
fn files() -> Vec<(Vec<u8>, &'static str)> {
    let whole = wav(2000, 1);
    let cut = |name: &str| {
        let mut file = clip(name);
        file.truncate(file.len() / 2);
        file
    };
    let with = |place: usize, bytes: &[u8]| {
        let mut file = whole.clone();
        file[place..place + bytes.len()].copy_from_slice(bytes);
        file
    };
    vec![
        (vec![0], "WAV, FLAC, MP3 or Ogg Vorbis"),
        (vec![0; 5000], "WAV, FLAC, MP3 or Ogg Vorbis"),
        (png(3, 2, 1, None), "WAV, FLAC, MP3 or Ogg Vorbis"),
        (
            b"RIFF\x04\0\0\0AVI ".to_vec(),
            "WAV, FLAC, MP3 or Ogg Vorbis",
        ),
        (whole[..whole.len() - 7].to_vec(), "truncated"),
        (cut("mono.flac"), "decoded"),
        (cut("mono.ogg"), "truncated"),
        // The rate, the channels, and the number of bytes of samples.
        (with(24, &3u32.to_le_bytes()), "3 samples in a second"),
        (
            with(24, &4_000_000_000u32.to_le_bytes()),
            "samples in a second",
        ),
        (with(22, &900u16.to_le_bytes()), "decoded"),
        (
            // A header that promises 35 minutes of samples.
            [
                b"RIFF\x24\0\0\x04",
                &whole[8..40],
                b"\0\0\0\x04",
                &whole[44..],
            ]
            .concat(),
            "longer than 30 seconds",
        ),
        (wav(30 * 16_000 + 1, 1), "longer than 30 seconds"),
        (wav(100, 1), "at least 161"),
        (wav(0, 1), "no samples"),
    ]
}

/// Parts that are malformed outside of the file, with words of the error.
fn parts() -> Vec<(Value, &'static str)> {
    let (data, long) = (base64(&wav(400, 1)), "QUJD".repeat(2000));
    let audio = |value: Value| json!({"type": "input_audio", "input_audio": value});
    let url = |url: &str| json!({"type": "audio_url", "audio_url": {"url": url}});
    vec![
        (json!({"type": "input_audio"}), "input_audio: is missing"),
        (audio(json!(null)), "input_audio: is missing"),
        (
            audio(json!(data)),
            "input_audio: expected an object with the field `data`",
        ),
        (audio(json!([data])), "input_audio: expected an object"),
        (audio(json!({})), "input_audio.data: is missing"),
        (
            audio(json!({"data": data})),
            "input_audio.format: is missing",
        ),
        (
            audio(json!({"format": "wav"})),
            "input_audio.data: is missing",
        ),
        (
            audio(json!({"data": 5, "format": "wav"})),
            "data: expected a text",
        ),
        (
            audio(json!({"data": data, "format": 5})),
            "format: expected a text",
        ),
        (
            audio(json!({"data": data, "format": "pcm16"})),
            "format: is \"pcm16\"",
        ),
        (audio(json!({"data": data, "format": long})), "format: is"),
        (
            audio(json!({"data": "", "format": "wav"})),
            "data: has no data",
        ),
        (
            audio(json!({"data": "*", "format": "wav"})),
            "data: is not base64",
        ),
        (
            audio(json!({"data": data, "format": "wav", "id": 1})),
            "unknown field \"id\"",
        ),
        (
            json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}, "image_url": {"url": "a"}}),
            "image_url: is in a part of the type \"input_audio\"",
        ),
        (
            json!({"type": "text", "text": "a", "input_audio": {"data": data, "format": "wav"}}),
            "input_audio: is in a part of the type \"text\"",
        ),
        (
            json!({"type": "audio", "audio": {"data": data}}),
            "type: is \"audio\"",
        ),
        (json!({"type": "audio_url"}), "audio_url: is missing"),
        (
            json!({"type": "audio_url", "audio_url": data}),
            "expected an object",
        ),
        (url("https://example.com/a.wav"), "nothing from the network"),
        (url("a.wav"), "--media-root"),
        (url("file:///etc/passwd"), "--media-root"),
        (
            url("data:image/png;base64,AAAA"),
            "media type \"image/png\"",
        ),
        (url(&format!("data:{long};base64,YWJj")), "media type"),
    ]
}

#[tokio::test]
async fn malformed_audio_is_refused_with_the_field_at_fault() {
    let harness = hearing(MediaOptions::default(), EngineOptions::default());
    let good = chat(&input_audio(&wav(4000, 1)));
    harness.chat(good.clone()).await.ok();
    for (file, words) in files() {
        let part = input_audio(&file);
        let found = [
            refused(&harness, CHAT, chat(&part), 400).await,
            refused(
                &harness,
                "/v1/responses",
                json!({"input": [{"role": "user", "content": [part]}]}),
                400,
            )
            .await,
        ];
        for message in found {
            assert!(message.contains("content[0].input_audio: "), "{message}");
            assert!(message.contains(words), "{words}: {message}");
        }
    }
    for (part, words) in parts() {
        let message = refused(&harness, CHAT, chat(&part), 400).await;
        assert!(message.starts_with("messages[0].content[0]."), "{message}");
        assert!(message.contains(words), "{words}: {message}");
    }
    harness.chat(good).await.ok();
    assert_eq!(harness.metric("gemma4_queued_requests").await, 0.0);
}

#[tokio::test]
async fn model_without_audio_refuses_clips_by_name() {
    let part = input_audio(&wav(400, 1));
    let harness = Harness::plain();
    let message = refused(&harness, CHAT, chat(&part), 400).await;
    let expected = "messages[0].content[0].input_audio: this model hears no audio: the embedded model has no audio";
    assert!(message.starts_with(expected), "{message}");
    let seeing = vec![model("vision-ple")];
    let options = ServerOptions::default();
    let harness = Harness::of_models(seeing, EngineOptions::default(), options, None);
    let message = refused(
        &harness,
        "/v1/responses",
        json!({"input": [{"role": "user", "content": [part]}]}),
        400,
    )
    .await;
    let expected =
        "input[0].content[0].input_audio: this model hears no audio: the checkpoint has no audio";
    assert!(message.starts_with(expected), "{message}");
}

#[tokio::test]
async fn audio_in_messages_of_other_roles_and_apis_is_refused() {
    let harness = hearing(MediaOptions::default(), EngineOptions::default());
    let part = input_audio(&wav(400, 1));
    for role in ["system", "assistant"] {
        let body = json!({"messages": [{"role": role, "content": [part]}]});
        let message = refused(&harness, CHAT, body, 400).await;
        assert!(message.contains("has text only"), "{message}");
    }
    let message = refused(&harness, "/v1/messages", chat(&part), 400).await;
    assert!(
        message.starts_with("messages[0].content[0].type: is \"input_audio\""),
        "{message}"
    );
}

#[tokio::test]
async fn limits_of_audio_are_enforced() {
    let file = wav(4000, 1);
    let part = input_audio(&file);
    let three = json!({"messages": [{"role": "user", "content": [part, part, part]}]});
    let limited = |audio| {
        let media = MediaOptions {
            audio,
            ..MediaOptions::default()
        };
        hearing(media, EngineOptions::default())
    };
    let harness = limited(AudioOptions {
        max_count: 2,
        ..AudioOptions::default()
    });
    let message = refused(&harness, CHAT, three, 400).await;
    assert_eq!(
        message,
        "messages[0].content[2].input_audio: is audio clip 3 of the request; expected at most 2 audio clips"
    );
    let harness = limited(AudioOptions {
        max_bytes: file.len() - 1,
        ..AudioOptions::default()
    });
    let message = refused(&harness, CHAT, chat(&part), 400).await;
    assert!(message.contains("input_audio.data: has"), "{message}");

    let media = MediaOptions {
        memory: 100 << 10,
        ..MediaOptions::default()
    };
    let harness = hearing(media, EngineOptions::default());
    let message = refused(&harness, CHAT, chat(&part), 400).await;
    assert!(message.contains("MiB to be decoded"), "{message}");
}

/// The checks of a request precede the decoding. The file is broken beyond its header, so a decoder would refuse it.
#[tokio::test]
async fn cheap_checks_precede_decoding() {
    let mut broken = png(40, 30, 1, None);
    let middle = broken.len() / 2;
    broken[middle] ^= 0x40;
    let engine = EngineOptions {
        context: 150,
        ..EngineOptions::default()
    };
    let harness = hearing(MediaOptions::default(), engine);
    let image = image_url(&broken);
    let with = |fields: Value| {
        let mut body = chat(&image);
        for (name, value) in fields.as_object().expect("fields") {
            body[name.as_str()] = value.clone();
        }
        body
    };
    let message = refused(&harness, CHAT, with(json!({})), 400).await;
    assert!(message.contains("cannot be decoded"), "{message}");
    for (fields, words) in [
        (json!({"n": 1000}), "n: is 1000"),
        (json!({"n": 0}), "n: is 0"),
        (json!({"temperature": 9}), "temperature: is 9"),
        (json!({"stop": ["a".repeat(2000)]}), "stop: has a string"),
        (
            json!({"tool_choice": "required"}),
            "tool_choice: asks for a tool",
        ),
        (json!({"max_tokens": 148}), "the answer may have 148"),
        (json!({"min_tokens": 5}), "min_tokens: is 5"),
        (
            json!({"response_format": {"type": "regex", "regex": "("}}),
            "response_format",
        ),
    ] {
        let message = refused(&harness, CHAT, with(fields), 400).await;
        assert!(message.contains(words), "{words}: {message}");
    }
    // The soft tokens of the images and the clip exceed the context.
    let content = json!([image, image, image]);
    let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
    let message = refused(&harness, CHAT, body, 400).await;
    assert!(message.contains("the prompt has at least"), "{message}");
    let long = input_audio(&wav(20 * 16_000, 1));
    let body = json!({"messages": [{"role": "user", "content": [image, long]}]});
    let message = refused(&harness, CHAT, body, 400).await;
    assert!(message.contains("the prompt has at least"), "{message}");
    // A clip without a length in its header is decoded, but not what follows.
    let mut piped = wav(20 * 16_000, 1);
    for size in [4..8, 40..44] {
        piped[size].fill(0xFF);
    }
    let content = json!([input_audio(&piped), image]);
    let body = json!({"messages": [{"role": "user", "content": content}]});
    let message = refused(&harness, CHAT, body, 400).await;
    assert!(message.contains("the prompt has at least"), "{message}");
    // The thinking budget of Anthropic's API.
    let source = json!({"type": "base64", "media_type": "image/png", "data": base64(&broken)});
    let body = json!({
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
        "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 9},
    });
    let message = refused(&harness, "/v1/messages", body, 400).await;
    assert!(message.starts_with("thinking.budget_tokens"), "{message}");
    // A count needs the headers only.
    let body =
        json!({"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]});
    let count = harness
        .post("/v1/messages/count_tokens", &with_model(body))
        .await
        .ok();
    assert!(count["input_tokens"].as_u64() > Some(40), "{count}");
    // A server that shuts down refuses before it decodes.
    harness.server.engines().drain();
    let message = refused(&harness, CHAT, with(json!({})), 503).await;
    assert!(message.contains("shutting down"), "{message}");
}
