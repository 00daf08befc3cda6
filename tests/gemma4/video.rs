//! Tests prompts with videos. The tokens, the soft tokens, the logits and the generated tokens equal those of Hugging
//! Face Transformers (`make_video.py`), for any prefill chunk.

mod refused;

use crate::devices::devices;
use crate::fixture::{Fixture, folder, greedy};
use crate::media::{check_batch, generated};
use burn::tensor::{DType, Device};
use burn_gemma4::{
    ChatOptions, Drafts, Gemma4, GenerateOptions, Image, KvPrecision, Logits, Message, Prompt,
    Video, VideoOptions,
};
use std::ops::ControlFlow;

/// The fixtures, and the checkpoints for which their results are: models like E2B, 31B and 12B.
const ALL: [(&str, &str); 3] = [
    ("video-ple", "vision-ple"),
    ("video-keqv", "vision-keqv"),
    ("video-unified", "vision-unified"),
];

/// The options for the frames of `make_video.py`, which begin every ten seconds.
fn of_frames() -> VideoOptions {
    VideoOptions {
        fps: Some(0.1),
        ..of_clip()
    }
}

fn of_clip() -> VideoOptions {
    VideoOptions {
        max_frames: Some(2),
        ..VideoOptions::default()
    }
}

fn open(name: &str, options: &VideoOptions) -> Video {
    Video::open(folder("videos").join(name), options).expect("the video is decodable")
}

/// The conversation of `make_video.py`.
fn conversation(checkpoint: &str) -> Vec<Message> {
    let image = Image::open(folder(checkpoint).join("wide.png")).expect("the image is decodable");
    vec![
        Message::user(vec![
            open("frames", &of_frames()).into(),
            "what is this?".into(),
        ]),
        Message::assistant("a red disc"),
        Message::user(vec![
            "and in".into(),
            image.into(),
            "or".into(),
            open("clip.png", &of_clip()).into(),
            "what is that?".into(),
        ]),
    ]
}

/// Calls `test` once for each fixture on every device, with the model in f32.
fn on_every_device(test: impl Fn(&Fixture, &Gemma4, Vec<Message>, &str)) {
    for device in devices() {
        for (name, checkpoint) in ALL {
            let gemma = Fixture::open(checkpoint).load(&device.device, DType::F32);
            let what = format!("{name} {}", device.name);
            test(
                &Fixture::open(name),
                &gemma,
                conversation(checkpoint),
                &what,
            );
        }
    }
}

/// Calls `test` once for each fixture on the CPU.
fn on_cpu(test: impl Fn(&Fixture, &Gemma4, Vec<Message>)) {
    for (name, checkpoint) in ALL {
        let gemma = Fixture::open(checkpoint).load(&Device::flex(), DType::F32);
        test(&Fixture::open(name), &gemma, conversation(checkpoint));
    }
}

/// Returns the soft tokens of all frames of the fixture's videos.
fn soft_tokens(gemma: &Gemma4) -> [burn::tensor::Tensor<2>; 2] {
    [open("frames", &of_frames()), open("clip.png", &of_clip())].map(|video| {
        let frames = gemma.video_soft_tokens(&video);
        burn::tensor::Tensor::cat(frames.expect("the model sees videos"), 0)
    })
}

#[test]
fn tokens_of_conversation_with_videos_equal_transformers() {
    on_cpu(|fixture, gemma, conversation| {
        for special_tokens in [false, true] {
            let chat = ChatOptions {
                special_tokens,
                ..ChatOptions::default()
            };
            let tokens = gemma.tokens(&Prompt::Chat(conversation.clone()), chat);
            let tokens = tokens.expect("the prompt is valid");
            assert_eq!(tokens, fixture.prompt, "{}", fixture.name);
        }
    });
}

#[test]
fn soft_tokens_of_videos_equal_transformers() {
    on_every_device(|fixture, gemma, _, what| {
        for (index, found) in soft_tokens(gemma).into_iter().enumerate() {
            let expected = fixture.reference(&format!("soft.{index}"));
            expected.assert_close(found, &format!("{what} {index}"));
        }
    });
}

/// The bound is that of images.
#[test]
fn soft_tokens_of_videos_in_half_precision_are_close_to_f32() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            for (name, checkpoint) in ALL.into_iter().filter(|_| device.computes_in(dtype)) {
                let gemma = Fixture::open(checkpoint).load(&device.device, dtype);
                let fixture = Fixture::open(name);
                for (index, found) in soft_tokens(&gemma).into_iter().enumerate() {
                    let what = format!("{name} {} {dtype:?} {index}", device.name);
                    let expected = fixture.reference(&format!("soft.{index}"));
                    let (error, largest) = expected.error(found, &what);
                    println!("{what}: {}", error / largest);
                    assert!(error <= 0.025 * largest, "{what}: {error} of {largest}");
                }
            }
        }
    }
}

#[test]
fn logits_of_conversation_with_videos_equal_transformers() {
    on_every_device(|fixture, gemma, conversation, what| {
        let logits = gemma
            .logits(conversation, ChatOptions::default(), Logits::All)
            .expect("the prompt is valid")
            .expect("all positions have logits");
        fixture.reference("logits").assert_close(logits, what);
    });
}

#[test]
fn generate_with_videos_equals_transformers_for_any_chunk() {
    on_every_device(|fixture, gemma, conversation, what| {
        for chunk in [None, Some(1), Some(7), Some(60), Some(100)] {
            let options = GenerateOptions {
                prefill_chunk: chunk,
                ..greedy(gemma, fixture.generated.len())
            };
            let found = generated(gemma, conversation.clone(), &options);
            assert_eq!(found.prompt_tokens, fixture.prompt, "{what} {chunk:?}");
            assert_eq!(found.tokens, fixture.generated, "{what} {chunk:?}");
        }
    });
}

#[test]
fn generate_with_videos_and_drafts_equals_transformers() {
    on_cpu(|fixture, gemma, conversation| {
        let options = GenerateOptions {
            drafts: Drafts::Lookup,
            ..greedy(gemma, fixture.generated.len())
        };
        let found = generated(gemma, conversation, &options);
        assert_eq!(found.tokens, fixture.generated, "{}", fixture.name);
    });
}

/// In an int8 cache the keys and values of a single call are those of several calls.
#[test]
fn generate_with_videos_in_int8_cache_is_the_same_for_any_chunk() {
    on_cpu(|fixture, gemma, conversation| {
        let tokens = [None, Some(1), Some(64)].map(|chunk| {
            let options = GenerateOptions {
                prefill_chunk: chunk,
                kv_precision: KvPrecision::Q8,
                ..greedy(gemma, 6)
            };
            generated(gemma, conversation.clone(), &options).tokens
        });
        assert_eq!(tokens[0], tokens[1], "{}", fixture.name);
        assert_eq!(tokens[0], tokens[2], "{}", fixture.name);
    });
}

#[test]
fn generate_batch_with_videos_equals_single_prompts() {
    on_cpu(|fixture, gemma, conversation| {
        let clip = open("clip.gif", &of_clip());
        let short = vec![Message::user(vec!["see".into(), clip.into()])];
        let text = vec![Message::user("no video")];
        check_batch(gemma, [conversation, short, text], fixture.name);
    });
}

#[test]
fn session_with_videos_reuses_equal_frames_only() {
    on_cpu(|fixture, gemma, conversation| {
        let options = greedy(gemma, 4);
        let mut session = gemma.session();
        let mut turn = |messages: &[Message]| {
            let found = session
                .generate(messages.to_vec(), &options, |_| ControlFlow::Continue(()))
                .expect("the prompt is valid");
            let expected = generated(gemma, messages.to_vec(), &options);
            assert_eq!(found.tokens, expected.tokens, "{}", fixture.name);
            found.prompt_tokens.len() - found.timings.prefill_tokens
        };
        assert_eq!(turn(&conversation[..1]), 0);
        // Both frames of the first video stay in the cache.
        assert!(turn(&conversation) > 2 * 63);
        // A video with another second frame has the same tokens, but other keys and values.
        let first = Image::open(folder("videos/frames").join("frame-1.png"));
        let first = first.expect("the image is decodable");
        let frames = vec![(0.0, first.clone()), (60.0, first)];
        let other = Video::from_frames(frames, &of_clip()).expect("the frames are valid");
        let mut changed = conversation.clone();
        changed[0] = Message::user(vec![other.into(), "what is this?".into()]);
        let reused = turn(&changed);
        assert!(reused < 2 * 63, "{reused}");
        turn(&[Message::user("what is this?")]);
        turn(&conversation);
    });
}

#[test]
fn open_of_animations_has_all_their_frames_and_times() {
    let gemma = Fixture::open("vision-ple").load(&Device::flex(), DType::F32);
    for name in ["clip.gif", "clip.png", "clip.webp"] {
        let video = open(name, &VideoOptions::default());
        let times = video.timestamps().collect::<Vec<_>>();
        assert_eq!(times, ["00:00", "00:31", "01:02", "01:33", "02:04"]);
        assert_eq!((video.width(), video.height()), (61, 71));
        let frames = gemma.video_soft_tokens(&video);
        assert_eq!(frames.expect("the model sees videos").len(), 5, "{name}");
        let bytes = std::fs::read(folder("videos").join(name)).expect("the file is readable");
        let same = Video::from_bytes(&bytes, &VideoOptions::default());
        assert_eq!(same.expect("the video is decodable"), video);
    }
}

#[test]
fn video_with_other_soft_tokens_has_that_many_placeholders() {
    let gemma = Fixture::open("vision-unified").load(&Device::flex(), DType::F32);
    let placeholder = gemma.tokenizer().id("<|video|>").expect("a special token");
    for most in [70, 140] {
        let options = VideoOptions {
            max_soft_tokens: Some(most),
            ..of_clip()
        };
        let video = open("clip.png", &options);
        let frames = gemma.video_soft_tokens(&video);
        let frames = frames.expect("the model sees videos");
        let rows: usize = frames.iter().map(|frame| frame.dims()[0]).sum();
        assert!(rows <= 2 * most && rows > most * 3 / 2, "{rows} of {most}");
        let prompt = Prompt::Chat(vec![Message::user(vec![video.into()])]);
        let tokens = gemma.tokens(&prompt, ChatOptions::default());
        let tokens = tokens.expect("the prompt is valid");
        let count = tokens.iter().filter(|token| **token == placeholder).count();
        assert_eq!(count, rows);
    }
}
