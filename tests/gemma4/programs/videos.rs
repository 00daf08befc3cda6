//! Tests videos on the command line of `gemma4 run` and in the conversations of `gemma4 chat`.

use super::refused::check;
use super::{gemma4, greedy, report, run, run_with_input, succeed};
use crate::fixture::{Fixture, folder};
use burn::tensor::{DType, Device};
use burn_gemma4::{ChatOptions, Message, Prompt, Video, VideoOptions};
use serde_json::json;

const MODEL: &str = "vision-unified";

fn path(name: &str) -> String {
    let path = folder("videos").join(name);
    path.to_str().expect("the path is UTF-8").to_owned()
}

#[test]
fn program_run_with_videos_reads_them_before_the_text() {
    let gemma = Fixture::open(MODEL).load(&Device::flex(), DType::F32);
    let open = |name: &str, fps| {
        let options = VideoOptions {
            fps,
            max_frames: Some(2),
            max_soft_tokens: None,
        };
        Video::open(path(name), &options).expect("the video is decodable")
    };
    let parts = vec![
        open("frames", Some(0.5)).into(),
        open("clip.gif", None).into(),
        "what is this?".into(),
    ];
    let prompt = Prompt::Chat(vec![Message::user(parts)]);
    let expected = gemma.tokens(&prompt, ChatOptions::default());
    let expected = expected.expect("the prompt is valid");
    let (frames, clip) = (path("frames"), path("clip.gif"));
    let mut command = greedy(MODEL, "flex");
    command.args(["--video", &frames, "--video", &clip, "--fps", "0.5"]);
    command.args(["--video-frames", "2", "what is this?"]);
    let ended = succeed(command.args(["--max-tokens", "3", "--ignore-eos", "--json"]));
    let report = report(&ended);
    assert_eq!(report["prompt_tokens"], json!(expected));
    let count = report["tokens"].as_array().map(Vec::len);
    assert_eq!(count, Some(3), "{ended:?}");
}

#[test]
fn program_run_with_wrong_video_names_it() {
    let written = tempfile::tempdir().expect("a folder is creatable");
    let mp4 = written.path().join("talk.mp4");
    std::fs::write(&mp4, b"\0\0\0\x20ftypisom\0\0\x02\0").expect("the file is writable");
    let mp4 = mp4.to_str().expect("the path is UTF-8");
    let models = [MODEL, "dense-ple"].map(|name| {
        let path = folder(name);
        path.to_str().expect("the path is UTF-8").to_owned()
    });
    let [unified, text] = &models;
    let (frames, clip) = (path("frames"), path("clip.gif"));
    for (what, model, arguments, code, words) in [
        (
            "MP4",
            unified,
            &["--video", mp4, "hi"][..],
            1,
            &["talk.mp4", "MP4", "ffmpeg"][..],
        ),
        (
            "no rate",
            unified,
            &["--video", &frames, "hi"],
            2,
            &["--fps", "frames"],
        ),
        (
            "rate without a folder",
            unified,
            &["--video", &clip, "--fps", "2", "hi"],
            2,
            &["--fps", "without a folder"],
        ),
        (
            "missing folder",
            unified,
            &["--video", "no-such-folder", "--fps", "2", "hi"],
            2,
            &["--video", "no-such-folder does not exist"],
        ),
        (
            "rate",
            unified,
            &["--video", &frames, "--fps", "0", "hi"],
            2,
            &["--fps", "0.001"],
        ),
        (
            "frames without a video",
            unified,
            &["--video-frames", "2", "hi"],
            2,
            &["--video-frames", "without a video"],
        ),
        (
            "frames",
            unified,
            &["--video", &clip, "--video-frames", "0", "hi"],
            2,
            &["--video-frames", "1024"],
        ),
        (
            "no vision",
            text,
            &["--video", &clip, "hi"],
            2,
            &["sees no images"],
        ),
        (
            "cache",
            unified,
            &["--video", &clip, "--cache", "session", "hi"],
            2,
            &["--cache"],
        ),
    ] {
        let mut command = gemma4("run");
        command
            .args(["--device", "flex", "--model", model])
            .args(arguments);
        check(what, &run(&mut command), code, words);
    }
}

#[test]
fn program_chat_with_video_answers_about_it() {
    let model = folder(MODEL);
    let chat = |arguments: &[&str], input: &str| {
        let mut command = gemma4("chat");
        command.args(["--device", "flex", "--dtype", "f32", "--temperature", "0"]);
        command.args(["--max-tokens", "12", "--video-frames", "2", "--model"]);
        command.arg(&model).args(arguments);
        run_with_input(&mut command, input)
    };
    let asked = "what is this?\nand now?\n";
    let blind = chat(&[], asked);
    let clip = chat(&[], &format!("/video {}\n{asked}", path("clip.png")));
    let frames = format!("/video {}\n{asked}", path("frames"));
    let rated = chat(&["--fps", "1"], &frames);
    for ended in [&blind, &clip, &rated] {
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
    assert_ne!(clip.stdout, blind.stdout);
    assert_ne!(rated.stdout, blind.stdout);
    check("rate", &chat(&[], &frames), 2, &["--fps"]);
    check("path", &chat(&[], "/video\n"), 2, &["/video"]);
}
