//! Tests prompts with audio. The soft tokens, the logits and the generated tokens equal those of Hugging Face
//! Transformers (`make_audio.py`), for any prefill chunk.

mod prefills;
mod refused;

use crate::devices::devices;
use crate::fixture::{Fixture, folder, greedy, values};
use crate::media::{self, check_batch, generated};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    Audio, ChatOptions, Drafts, Gemma4, GenerateOptions, Image, KvPrecision, Logits, Message,
    MessagePart, Prompt,
};
use serde_json::Value;
use std::{fs, ops::ControlFlow};

/// The fixtures: models like E2B and 12B.
const ALL: [&str; 2] = ["audio-ple", "audio-unified"];

fn audio(fixture: &str, name: &str) -> Audio {
    Audio::open(folder(fixture).join(name)).expect("the file is decodable")
}

/// The conversation of `make_audio.py`.
fn conversation(fixture: &str) -> Vec<Message> {
    let [long, short] =
        ["long.wav", "short.wav"].map(|name| MessagePart::Audio(audio(fixture, name)));
    let wide = Image::open(folder(fixture).join("wide.png")).expect("the image is decodable");
    vec![
        Message::user(vec![long, "what is this?".into()]),
        Message::assistant("a tone"),
        Message::user(vec!["and in".into(), wide.into(), "and".into(), short]),
    ]
}

/// Calls `test` once for every fixture on every device, with the model in f32.
fn on_every_device(test: impl Fn(&Fixture, &Gemma4, &str)) {
    media::on_every_device(&ALL, test);
}

/// Calls `test` once for every fixture on the CPU.
fn on_cpu(test: impl Fn(&Fixture, &Gemma4)) {
    media::on_cpu(&ALL, test);
}

#[test]
fn audio_soft_tokens_equal_transformers() {
    on_every_device(|fixture, gemma, what| {
        for (index, name) in ["long.wav", "short.wav"].into_iter().enumerate() {
            let found = gemma
                .audio_soft_tokens(&audio(fixture.name, name))
                .expect("the model hears audio");
            let what = format!("{what} {name}");
            fixture
                .reference(&format!("soft.{index}"))
                .assert_close(found, &what);
        }
    });
}

/// The bound is about three times the largest error that was found, 1.4 % in bf16 (2026-11-30, flex).
#[test]
fn audio_soft_tokens_in_half_precision_are_close_to_f32() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            for name in ALL.into_iter().filter(|_| device.computes_in(dtype)) {
                let fixture = Fixture::open(name);
                let gemma = fixture.load(&device.device, dtype);
                let found = gemma.audio_soft_tokens(&audio(name, "long.wav"));
                let found = found.expect("the model hears audio");
                assert_eq!(found.dtype(), dtype);
                let what = format!("{name} {} {dtype:?}", device.name);
                let (error, largest) = fixture.reference("soft.0").error(found, &what);
                println!("{what}: {}", error / largest);
                assert!(error <= 0.04 * largest, "{what}: {error} of {largest}");
            }
        }
    }
}

#[test]
fn tokens_of_conversation_with_audio_equal_transformers() {
    on_cpu(|fixture, gemma| {
        let prompt = Prompt::Chat(conversation(fixture.name));
        let tokens = gemma.tokens(&prompt, ChatOptions::default());
        assert_eq!(
            tokens.expect("the prompt is valid"),
            fixture.prompt,
            "{}",
            fixture.name
        );
    });
}

#[test]
fn logits_of_conversation_with_audio_equal_transformers() {
    on_every_device(|fixture, gemma, what| {
        let prompt = conversation(fixture.name);
        let logits = gemma
            .logits(prompt, ChatOptions::default(), Logits::All)
            .expect("the prompt is valid")
            .expect("all positions have logits");
        fixture.reference("logits").assert_close(logits, what);
    });
}

/// In bf16 the error is at most 1.5 times the error that Transformers has in bf16. In f16 it is at most that error.
/// Errors are root mean squares of the distance to f32.
#[test]
fn logits_of_audio_in_half_precision_are_as_close_to_f32_as_transformers() {
    for device in devices() {
        for (dtype, share) in [(DType::BF16, 1.5), (DType::F16, 1.0)] {
            for name in ALL.into_iter().filter(|_| device.computes_in(dtype)) {
                let fixture = Fixture::open(name);
                let gemma = fixture.load(&device.device, dtype);
                let logits = gemma
                    .logits(conversation(name), ChatOptions::default(), Logits::All)
                    .expect("the prompt is valid")
                    .expect("all positions have logits");
                let expected = &fixture.reference("logits").values;
                let pairs = values(logits).into_iter().zip(expected);
                let squares: f32 = pairs.map(|(one, other)| (one - other).powi(2)).sum();
                let distance = (squares / expected.len() as f32).sqrt();
                let theirs = bf16_distance(name);
                let what = format!("{name} {} {dtype:?}", device.name);
                println!("{what}: {distance}, {theirs}");
                assert!(distance <= share * theirs, "{what}: {distance} of {theirs}");
            }
        }
    }
}

/// Returns the distance of the logits that Transformers computes in bf16.
fn bf16_distance(fixture: &str) -> f32 {
    let text = fs::read_to_string(folder(fixture).join("reference.json"));
    let text = text.expect("the fixture is readable");
    let description: Value = serde_json::from_str(&text).expect("the description parses");
    let distance = description["bf16_distance"].as_f64();
    distance.expect("the fixture has the distance") as f32
}

#[test]
fn generate_with_audio_equals_transformers_for_any_chunk() {
    on_every_device(|fixture, gemma, what| {
        for chunk in [None, Some(1), Some(7), Some(60), Some(100)] {
            let options = GenerateOptions {
                prefill_chunk: chunk,
                ..greedy(gemma, fixture.generated.len())
            };
            let found = generated(gemma, conversation(fixture.name), &options);
            assert_eq!(found.prompt_tokens, fixture.prompt, "{what} {chunk:?}");
            assert_eq!(found.tokens, fixture.generated, "{what} {chunk:?}");
        }
    });
}

#[test]
fn generate_with_audio_and_drafts_equals_transformers() {
    on_cpu(|fixture, gemma| {
        let options = GenerateOptions {
            drafts: Drafts::Lookup,
            ..greedy(gemma, fixture.generated.len())
        };
        let found = generated(gemma, conversation(fixture.name), &options);
        assert_eq!(found.tokens, fixture.generated, "{}", fixture.name);
    });
}

/// In an int8 cache the keys and values of a single call are those of several calls.
#[test]
fn generate_with_audio_in_int8_cache_is_the_same_for_any_chunk() {
    on_cpu(|fixture, gemma| {
        let tokens = [None, Some(1), Some(64)].map(|chunk| {
            let options = GenerateOptions {
                prefill_chunk: chunk,
                kv_precision: KvPrecision::Q8,
                ..greedy(gemma, 6)
            };
            generated(gemma, conversation(fixture.name), &options).tokens
        });
        assert_eq!(tokens[0], tokens[1], "{}", fixture.name);
        assert_eq!(tokens[0], tokens[2], "{}", fixture.name);
    });
}

#[test]
fn generate_batch_with_audio_equals_single_prompts() {
    on_cpu(|fixture, gemma| {
        let whole = conversation(fixture.name);
        let short = MessagePart::Audio(audio(fixture.name, "short.wav"));
        let short = vec![Message::user(vec!["hear".into(), short])];
        let text = vec![Message::user("no audio")];
        check_batch(gemma, [whole, short, text], fixture.name);
    });
}

#[test]
fn session_with_audio_reuses_equal_clips_only() {
    on_cpu(|fixture, gemma| {
        let options = greedy(gemma, 4);
        let mut session = gemma.session();
        let mut turn = |messages: &[Message]| {
            let found = session
                .generate(messages.to_vec(), &options, |_| ControlFlow::Continue(()))
                .expect("the prompt is valid");
            let expected = generated(gemma, messages.to_vec(), &options);
            assert_eq!(found.tokens, expected.tokens, "{}", fixture.name);
            found
        };
        let messages = conversation(fixture.name);
        let first = turn(&messages[..1]);
        assert_eq!(first.timings.prefill_tokens, first.prompt_tokens.len());
        // The first clip stays in the cache.
        let second = turn(&messages);
        assert!(second.timings.prefill_tokens < second.prompt_tokens.len() - 31);
        // Another clip of the same length has the same tokens, but other keys and values.
        let mut other = messages.clone();
        let clip = audio(fixture.name, "long.wav");
        let backward: Vec<f32> = clip.samples().iter().rev().copied().collect();
        let backward = Audio::from_samples(&backward, 16_000).expect("the samples are valid");
        other[0] = Message::user(vec![backward.into(), "what is this?".into()]);
        let changed = turn(&other);
        assert_eq!(changed.prompt_tokens, second.prompt_tokens);
        assert!(changed.timings.prefill_tokens > second.timings.prefill_tokens);
        // The conversation without audio has a common beginning only.
        turn(&[Message::user("what is this?")]);
        turn(&messages);
    });
}

#[test]
fn save_session_with_audio_is_refused() {
    let fixture = Fixture::open("audio-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let path = folder.path().join("session");
    let mut session = gemma.session();
    let clip = MessagePart::Audio(audio(fixture.name, "short.wav"));
    let messages = vec![Message::user(vec![clip])];
    let error = session
        .save(&path, &messages)
        .expect_err("a message has audio");
    assert!(error.to_string().contains("audio"), "{error}");
    let options = greedy(&gemma, 1);
    session
        .generate(messages, &options, |_| ControlFlow::Continue(()))
        .expect("the prompt is valid");
    let error = session.save(&path, &[]).expect_err("the session has audio");
    assert!(error.to_string().contains("audio"), "{error}");
    session.reset();
    session.save(&path, &[]).expect("the session has no audio");
}

/// The longest clip has as many soft tokens as the processor of Hugging Face Transformers allows.
#[test]
fn longest_clip_has_750_soft_tokens() {
    let gemma = Fixture::open("audio-ple").load(&Device::flex(), DType::F32);
    let samples: Vec<f32> = (0..480_000)
        .map(|index| (index % 97) as f32 / 97.0)
        .collect();
    let longest = Audio::from_samples(&samples, 16_000).expect("30 seconds are valid");
    let rows = gemma.audio_soft_tokens(&longest);
    let rows = rows.expect("the model hears audio");
    assert_eq!(rows.dims()[0], 750);
    let sum = rows.abs().sum().into_scalar::<f32>();
    assert!(sum.is_finite());
}
