//! Tests audio on the command line of `gemma4 run` and in the conversations of `gemma4 chat`.

use super::refused::check;
use super::{Ended, gemma4, greedy, report, run, run_with_input, succeed};
use crate::fixture::{Fixture, folder};
use burn::tensor::{DType, Device};
use burn_gemma4::{Audio, ChatOptions, Image, Message, MessagePart, Prompt};
use serde_json::json;
use std::process::Command;

const MODEL: &str = "audio-unified";

fn path(name: &str) -> String {
    let path = folder(MODEL).join(name);
    path.to_str().expect("the path is UTF-8").to_owned()
}

#[test]
fn program_run_with_audio_and_image_reads_the_image_first() {
    let gemma = Fixture::open(MODEL).load(&Device::flex(), DType::F32);
    let (long, short, wide) = (path("long.wav"), path("short.wav"), path("wide.png"));
    let clip = |path: &str| MessagePart::Audio(Audio::open(path).expect("the file is decodable"));
    let image = Image::open(&wide).expect("the image is decodable");
    let parts = vec![image.into(), clip(&long), clip(&short), "what?".into()];
    let expected = gemma.tokens(
        &Prompt::Chat(vec![Message::user(parts)]),
        ChatOptions::default(),
    );
    let mut command = greedy(MODEL, "flex");
    command.args(["--audio", &long, "--audio", &short, "--image", &wide]);
    command.args(["what?", "--max-tokens", "3", "--ignore-eos", "--json"]);
    let ended = succeed(&mut command);
    let report = report(&ended);
    let expected = expected.expect("the prompt is valid");
    assert_eq!(report["prompt_tokens"], json!(expected));
    let tokens = report["tokens"].as_array().map(Vec::len);
    assert_eq!(tokens, Some(3), "{ended:?}");
}

#[test]
fn program_run_with_wrong_audio_names_it() {
    let unified = path("");
    let text = folder("dense-ple");
    let text = text.to_str().expect("the path is UTF-8");
    let (short, other) = (path("short.wav"), path("config.json"));
    for (what, model, arguments, code, words) in [
        (
            "no file",
            &unified[..],
            &["--audio", "absent.wav", "hi"][..],
            1,
            &["absent.wav"][..],
        ),
        (
            "no audio",
            &unified,
            &["--audio", &other, "hi"],
            1,
            &["config.json", "WAV, FLAC, MP3 or Ogg Vorbis"],
        ),
        (
            "text model",
            text,
            &["--audio", &short, "hi"],
            2,
            &["hears no audio"],
        ),
        (
            "size without an image",
            &unified,
            &["--audio", &short, "--image-tokens", "140", "hi"],
            2,
            &["--image-tokens", "without an image"],
        ),
        (
            "cache",
            &unified,
            &["--audio", &short, "--cache", "session", "hi"],
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

fn chat(arguments: &[&str], input: &str) -> Ended {
    let mut command: Command = gemma4("chat");
    command.args(["--device", "flex", "--dtype", "f32", "--temperature", "0"]);
    command.args(["--max-tokens", "3", "--model", &path("")]);
    command.args(arguments);
    run_with_input(&mut command, input)
}

#[test]
fn program_chat_with_audio_answers_about_it() {
    let heard = chat(
        &[],
        &format!("/audio {}\nwhat is this?\nand now?\n", path("long.wav")),
    );
    let deaf = chat(&[], "what is this?\nand now?\n");
    assert_eq!(
        (heard.code, deaf.code),
        (Some(0), Some(0)),
        "{heard:?} {deaf:?}"
    );
    assert_ne!(heard.stdout, deaf.stdout);
}

#[test]
fn program_chat_with_wrong_audio_is_an_error() {
    let cases: [(&str, &[&str]); 3] = [
        ("/audio\n", &["/audio", "path of a file"]),
        ("/audio absent.wav\n", &["absent.wav"]),
        (
            &format!("/audio {}\n", path("wide.png")),
            &["wide.png", "WAV, FLAC"],
        ),
    ];
    for (input, words) in cases {
        let ended = chat(&[], input);
        let error = ended
            .stderr
            .lines()
            .find(|line| line.starts_with("error: "));
        let error = error.unwrap_or_else(|| panic!("{ended:?}"));
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}
