//! Tests the engine with images and audio: other answers go on while they are encoded, cancelled requests free their
//! images, and requests with the same image or clip go to the engine that has it.

use crate::harness::{Harness, with_model};
use crate::pictures::{image_url, input_audio, model, png, text, wav};
use burn_gemma4::{Audio, EncodedPrompt, Image, Sampling};
use gemma4_serve::ServerOptions;
use gemma4_serve::engine::{AnswerOptions, Engine, EngineOptions, Event, MediaPool, Request};
use gemma4_serve::text::{ChatMessage, Part, TextModel};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

fn options(text: &TextModel, max_tokens: usize) -> AnswerOptions {
    AnswerOptions {
        max_tokens,
        sampling: Sampling::greedy(),
        ignore_stop_tokens: true,
        ..text.options(true)
    }
}

fn request(text: &TextModel, prompt: EncodedPrompt, max_tokens: usize) -> Request {
    Request {
        prompt,
        choices: 1,
        options: options(text, max_tokens),
        constraint: None,
        adapter: None,
        media_memory: None,
    }
}

/// Returns a prompt with one image of 529 soft tokens.
fn prompt(text: &TextModel, seed: u32) -> EncodedPrompt {
    let image = Image::from_bytes(&png(60, 60, seed, None)).expect("the image is decodable");
    let image = image
        .with_max_soft_tokens(560)
        .expect("the number is supported");
    let image = text
        .prepare("image", &image)
        .expect("the model sees images");
    let message = ChatMessage::User(vec![Part::Image(0)].into());
    let tokens = text.chat_tokens(&[message], &[], false);
    text.encode(tokens.expect("the conversation is valid"), &[image], &[])
        .expect("the prompt is valid")
}

#[tokio::test]
async fn cancelled_requests_free_the_memory_of_their_images() {
    let gemma = model("vision-ple");
    let text = TextModel::new(&gemma);
    let engine = EngineOptions {
        max_running: 1,
        prefill_chunk: Some(16),
        ..EngineOptions::default()
    };
    let (engine, _outcome) = Engine::start(gemma, engine).expect("the engine starts");
    let pool = MediaPool::new(64 << 20);
    let all = pool.free();
    // The image is prepared once, so that all requests wait before the first answer ends.
    let prompt = prompt(&text, 1);
    assert_eq!(prompt.media_bytes(), 529 * 48 * 48 * 3);
    let submit = |max_tokens| {
        let prompt = prompt.clone();
        let memory = pool.try_reserve(prompt.media_bytes());
        let mut request = request(&text, prompt, max_tokens);
        request.media_memory = Some(memory.expect("the pool has room"));
        engine.submit(request).expect("the queue has a place")
    };
    // One request is decoded, and the others wait in the queue.
    let mut running = submit(400);
    assert!(matches!(running.recv().await, Some(Event::Text { .. })));
    assert_eq!(pool.free(), all, "a request that is decoded holds no image");
    let waiting = [submit(9), submit(9), submit(9)];
    assert!(pool.free() < all);
    drop(waiting);
    while pool.free() < all {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    // A request is cancelled while its prompt is read.
    drop(running);
    drop(submit(9));
    while pool.free() < all {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

/// Returns a prompt with one clip of `seconds` seconds.
fn heard(text: &TextModel, seconds: usize) -> EncodedPrompt {
    let audio = Audio::from_bytes(&wav(16_000 * seconds, 1)).expect("the clip is decodable");
    let audio = text
        .prepare_audio("audio", &audio)
        .expect("the model hears audio");
    let message = ChatMessage::User(vec![Part::Audio(0)].into());
    let tokens = text.chat_tokens(&[message], &[], false);
    text.encode(tokens.expect("the conversation is valid"), &[], &[audio])
        .expect("the prompt is valid")
}

/// The audio of the fixture has several layers. The rows of the clip exceed the chunk, so each layer is a step.
#[tokio::test]
async fn answer_goes_on_while_a_clip_is_encoded() {
    let gemma = model("audio-ple");
    let text = TextModel::new(&gemma);
    let engine = EngineOptions {
        prefill_chunk: Some(64),
        load_audio: true,
        ..EngineOptions::default()
    };
    let (engine, _outcome) = Engine::start(gemma, engine).expect("the engine starts");
    let plain = text.text_prompt("what is this?");
    let plain = request(&text, plain.expect("the text has no placeholder"), 4);
    let clip = request(&text, heard(&text, 20), 1);
    let mut running = engine.submit(plain).expect("the queue has a place");
    let mut hearing = engine.submit(clip).expect("the queue has a place");
    assert!(matches!(hearing.recv().await, Some(Event::Text { .. })));
    let mut events = Vec::new();
    while let Ok(event) = running.try_recv() {
        events.push(event);
    }
    assert!(
        matches!(events.last(), Some(Event::End { .. })),
        "{events:?}"
    );
}

/// The vision of the fixture has two layers. The patches of the image exceed the chunk, so each layer is a step, and a
/// decode step follows. The other answer has therefore ended before the prompt with the image has been read.
#[tokio::test]
async fn answer_goes_on_while_an_image_is_encoded() {
    let gemma = model("vision-ple");
    let text = TextModel::new(&gemma);
    let engine = EngineOptions {
        prefill_chunk: Some(64),
        load_vision: true,
        ..EngineOptions::default()
    };
    let (engine, _outcome) = Engine::start(gemma, engine).expect("the engine starts");
    let plain = text.text_prompt("what is this?");
    let plain = request(&text, plain.expect("the text has no placeholder"), 5);
    let image = request(&text, prompt(&text, 2), 1);
    let mut running = engine.submit(plain).expect("the queue has a place");
    let mut seeing = engine.submit(image).expect("the queue has a place");
    assert!(matches!(seeing.recv().await, Some(Event::Text { .. })));
    let mut events = Vec::new();
    while let Ok(event) = running.try_recv() {
        events.push(event);
    }
    assert!(
        matches!(events.last(), Some(Event::End { .. })),
        "{events:?}"
    );
}

/// Prompts without images run in one pass if they wait together. A prompt with an image must not run in this pass,
/// because the pass would read its placeholders as text.
#[tokio::test]
async fn waiting_prompts_with_and_without_images_equal_those_alone() {
    let gemma = model("vision-ple");
    let text = TextModel::new(&gemma);
    let (engine, _outcome) =
        Engine::start(gemma, EngineOptions::default()).expect("the engine starts");
    let requests = || {
        let plain = |prompt: &str| text.text_prompt(prompt).expect("there is no placeholder");
        let prompts = [
            plain("what is this?"),
            prompt(&text, 3),
            plain("and this?"),
            prompt(&text, 4),
            plain("and what is that?"),
        ];
        prompts.map(|prompt| request(&text, prompt, 6))
    };
    let submit = |request| engine.submit(request).expect("the queue has a place");
    let mut alone = Vec::new();
    for request in requests() {
        alone.push(answer(submit(request)).await);
    }
    // The first request occupies the engine, so that the others wait together.
    let occupied = submit(request(&text, prompt(&text, 5), 40));
    let mut together = Vec::new();
    for events in requests().map(submit) {
        together.push(answer(events).await);
    }
    assert_eq!(together, alone);
    drop(occupied);
}

/// Returns the text of a request with one answer.
async fn answer(mut events: UnboundedReceiver<Event>) -> String {
    let mut answer = String::new();
    loop {
        match events.recv().await {
            Some(Event::Text { text, .. }) => answer += &text,
            Some(Event::End { .. }) => return answer,
            other => panic!("expected text or the end, found {other:?}"),
        }
    }
}

#[tokio::test]
async fn requests_follow_their_image_or_clip_to_its_engine() {
    let image = |seed| image_url(&png(90, 90, seed, None));
    requests_follow_their_medium("vision-unified", image).await;
    let clip = |seed| input_audio(&wav(60_000, seed as usize));
    requests_follow_their_medium("audio-unified", clip).await;
}

async fn requests_follow_their_medium(name: &str, medium: impl Fn(u32) -> Value) {
    let models = vec![model(name), model(name)];
    let engine = EngineOptions::default();
    let harness = Harness::of_models(models, engine, ServerOptions::default(), None);
    let send = async |seed: u32| {
        let content = json!([medium(seed), text("what is this?")]);
        let body = json!({
            "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0,
        });
        let answer = harness
            .post("/v1/chat/completions", &with_model(body))
            .await
            .ok();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone()
    };
    // Each medium goes to the engine that has had no request for the longest time.
    for seed in [1, 2] {
        assert_eq!(send(seed).await, 0);
    }
    for seed in [1, 2, 2, 1] {
        let cached = send(seed).await;
        assert!(
            cached.as_u64().is_some_and(|count| count > 64),
            "{seed}: {cached}"
        );
    }
    for device in ["flex:0", "flex:1"] {
        for reason in ["load", "prefix"] {
            let name =
                format!("gemma4_routed_requests_total{{device=\"{device}\",reason=\"{reason}\"}}");
            let expected = if reason == "load" { 1.0 } else { 2.0 };
            assert_eq!(harness.metric(&name).await, expected, "{name}");
        }
    }
}
