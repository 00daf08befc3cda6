//! Tests that answers about audio equal those of `Gemma4::generate` with the same clips, through the APIs with audio.

use crate::conversations::{Case, TOKENS, body, case, check, harness};
use crate::harness::with_model;
use crate::pictures::{HEARING, base64, clip, input_audio, model, png, text, wav};
use burn_gemma4::{Gemma4, Message};
use futures_util::future::join_all;
use gemma4_serve::engine::EngineOptions;
use gemma4_serve::{MediaOptions, run_batch_file};
use serde_json::{Map, Value, json};

/// Clips of different lengths and formats, then an image.
fn files() -> Vec<Vec<u8>> {
    vec![
        wav(9000, 1),
        wav(9000, 2),
        clip("stereo.mp3"),
        clip("mono.flac"),
        clip("mono.ogg"),
        png(53, 97, 2, None),
    ]
}

fn cases(gemma: &Gemma4, files: &[Vec<u8>]) -> Vec<Case> {
    let question = json!({"text": "what is this?"});
    let turns = [
        vec![json!([{"audio": 0}, question])],
        vec![json!([{"text": "what is a lynx?"}])],
        vec![json!([{"audio": 1}, question])],
        vec![
            json!([{"text": "hear"}, {"audio": 2}, {"text": "see"}, {"image": 5}, {"audio": 3}, question]),
        ],
        vec![
            json!([{"image": 5}, {"audio": 4}]),
            json!([{"text": "a tone"}]),
            json!([{"text": "and in"}, {"audio": 0}, {"text": "the other one?"}]),
        ],
    ];
    turns
        .iter()
        .map(|turns| case(gemma, turns, files))
        .collect()
}

#[tokio::test]
async fn answers_about_audio_equal_generate_with_and_without_prefix_cache_for_any_chunk() {
    for name in HEARING {
        let cases = cases(&model(name), &files());
        for (chunk, prefix_cache_bytes) in [(None, 0), (None, 64 << 20), (Some(30), 64 << 20)] {
            let engine = EngineOptions {
                prefill_chunk: chunk,
                prefix_cache_bytes,
                load_audio: true,
                ..EngineOptions::default()
            };
            let harness = harness(name, engine);
            for round in 0..3 {
                for (index, case) in cases.iter().enumerate() {
                    let what = format!("{name} {chunk:?} {prefix_cache_bytes} {index} {round}");
                    let cached = check(&harness, case, &what).await;
                    match (prefix_cache_bytes, round) {
                        (0, _) => assert_eq!(cached, 0, "{what}"),
                        (_, 2) => assert!(cached >= 16, "{what}: {cached}"),
                        _ => (),
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn batched_answers_with_and_without_audio_equal_generate() {
    for name in HEARING {
        let cases = cases(&model(name), &files());
        let engine = EngineOptions {
            prefill_chunk: Some(40),
            ..EngineOptions::default()
        };
        let harness = harness(name, engine);
        let all = cases.iter().cycle().take(2 * cases.len()).enumerate();
        join_all(
            all.map(async |(index, case)| check(&harness, case, &format!("{name} {index}")).await),
        )
        .await;
    }
}

/// The prompts have the same tokens, and the clips differ. The question is long, so that its tokens would be worth
/// sharing.
#[tokio::test]
async fn clips_that_differ_share_only_the_tokens_before_them() {
    for name in HEARING {
        let gemma = model(name);
        let begin = "Listen to this recording for as long as you need, and tell me what it says.";
        let turns = |clip: usize| vec![json!([{"text": begin}, {"audio": clip}, {"text": begin}])];
        let cases = [0, 1].map(|clip| case(&gemma, &turns(clip), &files()));
        let before = gemma
            .tokens(
                &vec![Message::user(begin)].into(),
                gemma.chat_options().chat,
            )
            .expect("the prompt is valid")
            .len();
        let harness = harness(name, EngineOptions::default());
        let length = cases[0].prompt_tokens;
        assert_eq!(length, cases[1].prompt_tokens);
        assert_eq!(check(&harness, &cases[0], name).await, 0);
        assert_eq!(check(&harness, &cases[0], name).await, length - 1);
        let shared = check(&harness, &cases[1], name).await;
        assert!(shared < before, "{name}: {shared} of {before}");
        assert_eq!(check(&harness, &cases[1], name).await, length - 1);
    }
}

#[tokio::test]
async fn answers_of_every_api_with_audio_equal_generate() {
    let file = clip("stereo.wav");
    let gemma = model("audio-ple");
    let turns = [json!([{"text": "hear"}, {"audio": 0}, {"text": "what is this?"}])];
    let expected = case(&gemma, &turns, std::slice::from_ref(&file));
    let harness = harness("audio-ple", EngineOptions::default());
    let input = json!([{"role": "user", "content": [
        {"type": "input_text", "text": "hear"},
        input_audio(&file),
        {"type": "input_text", "text": "what is this?"},
    ]}]);
    let asked = with_model(json!({"input": input, "max_output_tokens": TOKENS, "temperature": 0}));
    let response = harness.post("/v1/responses", &asked).await.ok();
    assert_eq!(
        response["output"][0]["content"][0]["text"],
        expected.answer.as_str()
    );
    assert_eq!(response["usage"]["input_tokens"], expected.prompt_tokens);

    let mut streamed = body(&expected);
    streamed["stream"] = json!(true);
    let chunks = harness
        .post("/v1/chat/completions", &streamed)
        .await
        .chunks();
    let deltas = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    assert_eq!(deltas.collect::<String>(), expected.answer);

    // vLLM's part has a URL.
    let url = format!("data:audio/wav;base64,{}", base64(&file));
    let content = json!([
        text("hear"), {"type": "audio_url", "audio_url": {"url": url}}, text("what is this?"),
    ]);
    let answer = harness
        .chat(json!({
            "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0,
        }))
        .await
        .ok();
    let content = answer["choices"][0]["message"]["content"].as_str();
    assert_eq!(content.unwrap_or_default(), expected.answer);
}

#[test]
fn batch_file_reads_audio_from_data_and_files() {
    let gemma = model("audio-unified");
    let file = wav(5000, 4);
    let expected = case(
        &gemma,
        &[json!([{"audio": 0}, {"text": "what is this?"}])],
        std::slice::from_ref(&file),
    );
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("a tone.wav"), &file).expect("a file");
    let url = |url: &str| json!({"type": "audio_url", "audio_url": {"url": url}});
    let parts = [input_audio(&file), url("a tone.wav"), url("../a.wav")];
    let lines = parts.iter().map(|part| {
        let content = json!([part, text("what is this?")]);
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
    assert_eq!((counts.answered, counts.failed), (2, 1));
    assert_eq!(counts.prompt_tokens, 2 * expected.prompt_tokens as u64);
    let output = String::from_utf8(output).expect("UTF-8");
    let lines: Vec<Value> = output
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    for line in &lines[..2] {
        let message = &line["response"]["body"]["choices"][0]["message"];
        assert_eq!(
            message["content"].as_str().unwrap_or_default(),
            expected.answer
        );
    }
    let refused = lines[2].to_string();
    assert!(
        refused.contains("cannot be read in the folder of media"),
        "{refused}"
    );
}
