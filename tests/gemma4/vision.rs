//! Tests prompts with images. The soft tokens, the logits and the generated tokens equal those of Hugging Face
//! Transformers (`make_vision.py`), for any prefill chunk.

mod prefills;
mod refused;

use crate::devices::devices;
use crate::fixture::{Fixture, folder, greedy};
use crate::media::{self, check_batch, generated};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    ChatOptions, Drafts, Gemma4, GenerateOptions, Image, KvPrecision, Logits, Message, MessagePart,
    Prompt,
};
use std::ops::ControlFlow;

/// The fixtures: models like E2B, 31B and 12B.
const ALL: [&str; 3] = ["vision-ple", "vision-keqv", "vision-unified"];

fn image(fixture: &str, name: &str) -> Image {
    Image::open(folder(fixture).join(name)).expect("the image is decodable")
}

/// The conversation of `make_vision.py`.
fn conversation(fixture: &str) -> Vec<Message> {
    let [wide, tall] =
        ["wide.png", "tall.png"].map(|name| MessagePart::Image(image(fixture, name)));
    vec![
        Message::user(vec![wide, "what is this?".into()]),
        Message::assistant("a red disc"),
        Message::user(vec!["and in".into(), tall, "the other one?".into()]),
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
fn soft_tokens_equal_transformers() {
    on_every_device(|fixture, gemma, what| {
        for (index, name) in ["wide.png", "tall.png"].into_iter().enumerate() {
            let found = gemma
                .soft_tokens(&image(fixture.name, name))
                .expect("the model sees images");
            let what = format!("{what} {name}");
            fixture
                .reference(&format!("soft.{index}"))
                .assert_close(found, &what);
        }
    });
}

/// The bound is about three times the largest error that was found, 0.8 % in bf16 (2026-11-29, flex).
#[test]
fn soft_tokens_in_half_precision_are_close_to_f32() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            for name in ALL.into_iter().filter(|_| device.computes_in(dtype)) {
                let fixture = Fixture::open(name);
                let gemma = fixture.load(&device.device, dtype);
                let found = gemma.soft_tokens(&image(name, "wide.png"));
                let found = found.expect("the model sees images");
                assert_eq!(found.dtype(), dtype);
                let what = format!("{name} {} {dtype:?}", device.name);
                let (error, largest) = fixture.reference("soft.0").error(found, &what);
                println!("{what}: {}", error / largest);
                assert!(error <= 0.025 * largest, "{what}: {error} of {largest}");
            }
        }
    }
}

#[test]
fn tokens_of_conversation_with_images_equal_transformers() {
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
fn logits_of_conversation_with_images_equal_transformers() {
    on_every_device(|fixture, gemma, what| {
        let prompt = conversation(fixture.name);
        let logits = gemma
            .logits(prompt, ChatOptions::default(), Logits::All)
            .expect("the prompt is valid")
            .expect("all positions have logits");
        fixture.reference("logits").assert_close(logits, what);
    });
}

#[test]
fn generate_with_images_equals_transformers_for_any_chunk() {
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
fn generate_with_images_and_drafts_equals_transformers() {
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
fn generate_with_images_in_int8_cache_is_the_same_for_any_chunk() {
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
fn generate_batch_with_images_equals_single_prompts() {
    on_cpu(|fixture, gemma| {
        let whole = conversation(fixture.name);
        let tall = MessagePart::Image(image(fixture.name, "tall.png"));
        let short = vec![Message::user(vec!["see".into(), tall])];
        let text = vec![Message::user("no image")];
        check_batch(gemma, [whole, short, text], fixture.name);
    });
}

#[test]
fn session_with_images_reuses_equal_images_only() {
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
        // The first image stays in the cache.
        let second = turn(&messages);
        assert!(second.timings.prefill_tokens < second.prompt_tokens.len() - 55);
        // Another image of the same size has the same tokens, but other keys and values.
        let mut other = messages.clone();
        let pixels = (0..131 * 67 * 3).map(|index| (index % 251) as u8).collect();
        let pixels = Image::from_rgb(131, 67, pixels).expect("the number of bytes is right");
        other[0] = Message::user(vec![pixels.into(), "what is this?".into()]);
        let changed = turn(&other);
        assert_eq!(changed.prompt_tokens, second.prompt_tokens);
        assert!(changed.timings.prefill_tokens > second.timings.prefill_tokens);
        // The conversation without images has a common beginning only.
        turn(&[Message::user("what is this?")]);
        turn(&messages);
    });
}

#[test]
fn save_session_with_images_is_refused() {
    let fixture = Fixture::open("vision-ple");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let path = folder.path().join("session");
    let mut session = gemma.session();
    let messages = conversation(fixture.name);
    let error = session
        .save(&path, &messages)
        .expect_err("a message has images");
    assert!(error.to_string().contains("images"), "{error}");
    let options = greedy(&gemma, 1);
    session
        .generate(messages, &options, |_| ControlFlow::Continue(()))
        .expect("the prompt is valid");
    let error = session
        .save(&path, &[])
        .expect_err("the session has images");
    assert!(error.to_string().contains("images"), "{error}");
    session.reset();
    session.save(&path, &[]).expect("the session has no images");
}

#[test]
fn image_with_other_soft_tokens_has_that_many_placeholders() {
    let fixture = Fixture::open("vision-unified");
    let gemma = fixture.load(&Device::flex(), DType::F32);
    let placeholder = gemma
        .tokenizer()
        .id("<|image|>")
        .expect("the vocabulary has the token");
    for most in [70, 140, 280] {
        let image = image(fixture.name, "wide.png").with_max_soft_tokens(most);
        let image = image.expect("the number is supported");
        let rows = gemma
            .soft_tokens(&image)
            .expect("the model sees images")
            .dims()[0];
        assert!(rows <= most && rows > most * 3 / 4, "{rows} of {most}");
        let prompt = Prompt::Chat(vec![Message::user(vec![image.into()])]);
        let tokens = gemma
            .tokens(&prompt, ChatOptions::default())
            .expect("the prompt is valid");
        let count = tokens.iter().filter(|token| **token == placeholder).count();
        assert_eq!(count, rows);
    }
    let error = image(fixture.name, "wide.png").with_max_soft_tokens(100);
    assert!(
        error
            .expect_err("the number is refused")
            .to_string()
            .contains("70, 140")
    );
}
