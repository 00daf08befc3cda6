//! Tests videos and prompts that are refused, and the messages of the errors.

use super::{of_clip, of_frames, open};
use crate::altered::altered;
use crate::fixture::{Fixture, folder, greedy};
use crate::media::{generated, refused};
use burn::tensor::{DType, Device};
use burn_gemma4::{ChatOptions, Gemma4, Image, LoadOptions, Message, Prompt, Video, VideoOptions};
use serde_json::{Value, json};
use std::fs;

fn gemma() -> Gemma4 {
    Fixture::open("vision-ple").load(&Device::flex(), DType::F32)
}

fn with_fps(fps: f64) -> VideoOptions {
    VideoOptions {
        fps: Some(fps),
        ..VideoOptions::default()
    }
}

/// Returns the error of a video that is refused.
fn refused_video(name: &str, options: &VideoOptions) -> String {
    let outcome = Video::open(folder("videos").join(name), options);
    outcome.expect_err("the video is refused").to_string()
}

#[test]
fn open_of_video_file_names_its_format_and_ffmpeg() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    for (name, bytes, format) in [
        ("a.mp4", &b"\0\0\0\x20ftypisom\0\0\x02\0"[..], "MP4"),
        ("a.mov", b"\0\0\0\x14ftypqt  \0\0\x02\0", "MOV"),
        ("a.webm", b"\x1A\x45\xDF\xA3\x9F\x42\x86\x81", "WebM"),
        ("a.avi", b"RIFF\0\0\0\0AVI LIST", "AVI"),
    ] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("the file is writable");
        // A longer file is refused for its format too, not for its size.
        let file = fs::File::options().write(true).open(&path);
        let file = file.expect("the file is writable");
        file.set_len(100 << 20).expect("the file is growable");
        let error = Video::open(&path, &VideoOptions::default());
        let error = error.expect_err("the format is refused").to_string();
        for words in [name, format, "ffmpeg -i FILE -vf fps=1"] {
            assert!(error.contains(words), "{error}");
        }
    }
}

#[test]
fn open_of_still_image_or_other_file_is_refused() {
    let none = VideoOptions::default();
    for name in ["photograph.png", "photograph.jpg", "photograph.webp"] {
        let error = refused_video(&format!("../images/{name}"), &none);
        assert!(error.contains("still image"), "{error}");
    }
    let error = refused_video("processed.json", &none);
    assert!(error.contains("GIF, PNG or WebP"), "{error}");
    let error = refused_video("missing.gif", &none);
    assert!(error.contains("missing.gif"), "{error}");
}

#[cfg(unix)]
#[test]
fn open_of_pipe_reads_it_once() {
    let written = tempfile::tempdir().expect("a folder is creatable");
    let pipe = written.path().join("clip");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.expect("mkfifo is runnable").success());
    let clip = fs::read(folder("videos").join("clip.gif")).expect("the clip is readable");
    let video = std::thread::scope(|scope| {
        scope.spawn(|| fs::write(&pipe, clip).expect("the pipe is writable"));
        Video::open(&pipe, &of_clip())
    });
    let expected = open("clip.gif", &of_clip());
    assert_eq!(video.expect("the clip is decodable"), expected);
}

#[test]
fn open_with_wrong_options_names_the_option() {
    let frames = |options: VideoOptions| refused_video("frames", &options);
    for (error, words) in [
        (frames(VideoOptions::default()), "fps: is missing"),
        (frames(with_fps(0.0)), "from 0.001"),
        (frames(with_fps(f64::NAN)), "from 0.001"),
        (refused_video("clip.gif", &with_fps(1.0)), "have times"),
        (
            frames(VideoOptions {
                max_frames: Some(0),
                ..of_frames()
            }),
            "max_frames",
        ),
        (
            frames(VideoOptions {
                max_frames: Some(1025),
                ..of_frames()
            }),
            "max_frames",
        ),
        (
            frames(VideoOptions {
                max_soft_tokens: Some(71),
                ..of_frames()
            }),
            "max_soft_tokens",
        ),
    ] {
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn open_of_folder_refuses_files_that_are_no_frames() {
    let whole = tempfile::tempdir().expect("a folder is creatable");
    let path = |name: &str| whole.path().join(name);
    let copy = |from: &str, to: &str| {
        fs::copy(folder("videos").join(from), path(to)).expect("the file is copyable");
    };
    let open = || Video::open(whole.path(), &with_fps(1.0));
    let error = open().expect_err("the folder is empty").to_string();
    assert!(error.contains("has no PNG"), "{error}");
    copy("frames/frame-1.png", "frame-1.png");
    fs::write(path(".hidden"), "").expect("the file is writable");
    assert_eq!(open().expect("one frame").timestamps().count(), 1);

    copy("frames/frame-1.png", "frame-2.PNG");
    assert_eq!(open().expect("two frames").timestamps().count(), 2);
    copy("../images/photograph.png", "frame-10.png");
    let error = open().expect_err("another size").to_string();
    let words = "61 x 43 pixels; expected 83 x 59";
    assert!(
        error.contains(words) && error.contains("frame-10.png"),
        "{error}"
    );
    fs::write(path("frame-10.png"), "not a PNG file").expect("the file is writable");
    let error = open().expect_err("a broken file").to_string();
    assert!(error.contains("frame-10.png"), "{error}");
    // A file that is not sampled is not read.
    let options = VideoOptions {
        max_frames: Some(1),
        ..with_fps(1.0)
    };
    Video::open(whole.path(), &options).expect("the first frame is valid");

    copy("clip.png", "frame-1.png");
    let error = open().expect_err("an animation").to_string();
    assert!(error.contains("is an animation"), "{error}");

    fs::write(path("notes.txt"), "").expect("the file is writable");
    let error = open().expect_err("a text").to_string();
    assert!(error.contains("notes.txt"), "{error}");
}

#[test]
fn from_frames_of_wrong_frames_is_refused() {
    let image =
        |width: usize| Image::from_rgb(width, 1, vec![7; 3 * width]).expect("the bytes fit");
    let none = VideoOptions::default();
    for (frames, options, words) in [
        (vec![], none, "no frames"),
        (vec![(0.0, image(2)), (1.0, image(3))], none, "one size"),
        (vec![(1.0, image(2)), (0.0, image(2))], none, "ascend"),
        (vec![(f64::NAN, image(2))], none, "NaN"),
        (vec![(-1.0, image(2))], none, "-1"),
        (vec![(1e9, image(2))], none, "1000000000"),
        (vec![(0.0, image(2))], with_fps(1.0), "have times"),
    ] {
        let error = Video::from_frames(frames, &options);
        let error = error.expect_err("the frames are refused").to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    let error = Video::from_files(&[], &with_fps(1.0)).expect_err("no files");
    assert!(error.to_string().contains("no frames"), "{error}");
}

#[test]
fn prompt_with_video_placeholders_in_texts_is_refused() {
    let gemma = gemma();
    let video = open("clip.png", &of_clip());
    let parts = vec![video.into(), "what is <|video|>?".into()];
    let conversation = vec![Message::user(parts)];
    // Without special tokens in texts, the text has no placeholder.
    let found = generated(&gemma, conversation.clone(), &greedy(&gemma, 1));
    let placeholder = gemma.tokenizer().id("<|video|>").expect("a special token");
    let tokens = found.prompt_tokens.into_iter();
    assert_eq!(tokens.filter(|token| *token == placeholder).count(), 126);
    let special = ChatOptions {
        special_tokens: true,
        ..ChatOptions::default()
    };
    let error = refused(&gemma, conversation, special);
    assert!(
        error.contains("2 video placeholders, but 1 videos"),
        "{error}"
    );
    let error = refused(&gemma, "see <|video|>", ChatOptions::default());
    assert!(error.contains("placeholder of video"), "{error}");
}

/// The pixels of frames are prepared without the tokenizer, so a caller could omit the timestamps.
#[test]
fn encode_of_other_numbers_of_frames_is_refused() {
    let gemma = gemma();
    let encoder = gemma.prompt_encoder();
    assert_eq!(encoder.video_frames().expect("the model sees videos"), 32);
    let video = encoder.prepare_video(&open("clip.png", &of_clip()));
    let video = video.expect("the model sees videos");
    assert_eq!((video.frames(), video.bytes()), (2, 2 * 63 * 48 * 48 * 3));
    let placeholder = gemma.tokenizer().id("<|video|>").expect("a special token");
    for (count, is_valid) in [(1, false), (2, true), (3, false)] {
        let tokens = vec![placeholder; count];
        let outcome = encoder.encode_with_videos(tokens, &[], std::slice::from_ref(&video), &[]);
        match outcome {
            Ok(prompt) => assert!(is_valid && prompt.media().count() == 2),
            Err(error) => {
                let words = format!("{count} video frame placeholders, but 2 frames");
                assert!(!is_valid && error.to_string().contains(&words), "{error}");
            }
        }
    }
    let text = encoder.expand_videos("a <|video|> b", std::slice::from_ref(&video));
    let text = text.expect("one placeholder");
    assert_eq!(text, "a 00:00 <|video|> 01:02 <|video|> b");
    let error = encoder
        .expand_videos("a b", &[video])
        .expect_err("no placeholder");
    assert!(
        error.to_string().contains("0 video placeholders"),
        "{error}"
    );
}

/// Loads a checkpoint with another video processor or configuration.
fn loaded(change: impl FnOnce(&mut Value), processor: Value) -> Gemma4 {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    altered("vision-ple", change, folder.path());
    let path = folder.path().join("processor_config.json");
    fs::write(path, json!({"video_processor": processor}).to_string()).expect("writable");
    let gemma = Gemma4::load(folder.path(), &Device::flex(), LoadOptions::new());
    gemma.expect("the text model is loadable")
}

#[test]
fn load_with_unsupported_video_processor_refuses_videos_only() {
    let sampled = json!({"do_sample_frames": false});
    let outside = |config: &mut Value| config["video_token_id"] = json!(258_884);
    for (gemma, words) in [
        (loaded(|_| (), sampled), "do_sample_frames"),
        (loaded(|_| (), json!({"patch_size": 14})), "patch_size"),
        (loaded(outside, json!({})), "outside the vocabulary"),
    ] {
        gemma.check_vision().expect("the model sees images");
        let error = gemma.check_video().expect_err("no videos").to_string();
        assert!(error.contains(words), "{error}");
        let message = Message::user(vec![open("clip.png", &of_clip()).into()]);
        let error = refused(&gemma, vec![message], ChatOptions::default());
        assert!(
            error.contains("sees no videos") && error.contains(words),
            "{error}"
        );
    }
}

#[test]
fn video_sampled_for_another_number_of_frames_is_refused() {
    let gemma = loaded(|_| (), json!({"num_frames": 4, "max_soft_tokens": 70}));
    assert_eq!(gemma.prompt_encoder().video_frames().expect("videos"), 4);
    // The clip has five frames, and four frames are not sampled.
    let image = Image::from_rgb(96, 96, vec![7; 3 * 96 * 96]).expect("the bytes fit");
    let frames = (0..4).map(|second| (f64::from(second), image.clone()));
    let short = Video::from_frames(frames.collect(), &VideoOptions::default());
    let short = short.expect("the frames are valid");
    let prompt = Prompt::Chat(vec![Message::user(vec![short.into()])]);
    gemma
        .tokens(&prompt, ChatOptions::default())
        .expect("every processor shows all four frames");
    let prompt = |options: &VideoOptions| {
        let video = open("clip.png", options);
        Prompt::Chat(vec![Message::user(vec![video.into()])])
    };
    let error = gemma.tokens(&prompt(&VideoOptions::default()), ChatOptions::default());
    let error = error.expect_err("sampled for 32 frames").to_string();
    assert!(
        error.contains("samples 4") && error.contains("max_frames"),
        "{error}"
    );
    let chosen = VideoOptions {
        max_frames: Some(4),
        ..VideoOptions::default()
    };
    gemma
        .tokens(&prompt(&chosen), ChatOptions::default())
        .expect("the caller has chosen the number");
}

#[test]
fn save_session_with_videos_is_refused() {
    let gemma = gemma();
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let messages = [Message::user(vec![open("clip.png", &of_clip()).into()])];
    let error = gemma
        .session()
        .save(folder.path().join("session"), &messages)
        .expect_err("a message has a video");
    assert!(error.to_string().contains("videos"), "{error}");
}
