//! Tests images on the command line of `gemma4 run` and in the conversations of `gemma4 chat`.

use super::refused::check;
use super::{Ended, gemma4, greedy, report, run, run_with_input, succeed};
use crate::fixture::{Fixture, folder};
use burn::tensor::{DType, Device};
use burn_gemma4::{ChatOptions, Gemma4, Image, Message, MessagePart, Prompt};
use serde_json::json;
use std::process::Command;

const MODEL: &str = "vision-unified";

fn path(name: &str) -> String {
    let path = folder(MODEL).join(name);
    path.to_str().expect("the path is UTF-8").to_owned()
}

fn gemma() -> Gemma4 {
    Fixture::open(MODEL).load(&Device::flex(), DType::F32)
}

/// Returns the tokens of a prompt with images before a text.
fn tokens(gemma: &Gemma4, images: &[&str], most: usize, text: &str) -> Vec<u32> {
    let images = images.iter().map(|name| {
        let image = Image::open(path(name)).expect("the image is decodable");
        MessagePart::Image(
            image
                .with_max_soft_tokens(most)
                .expect("the number is supported"),
        )
    });
    let parts: Vec<MessagePart> = images.chain([text.into()]).collect();
    let prompt = Prompt::Chat(vec![Message::user(parts)]);
    gemma
        .tokens(&prompt, ChatOptions::default())
        .expect("the prompt is valid")
}

#[test]
fn program_run_with_images_reads_them_before_the_text() {
    let gemma = gemma();
    let (wide, tall) = (path("wide.png"), path("tall.png"));
    let images = ["--image", &wide, "--image", &tall];
    let end = ["--max-tokens", "3", "--ignore-eos", "--json"];
    for (most, size) in [(70, &[][..]), (140, &["--image-tokens", "140"][..])] {
        let mut command = greedy(MODEL, "flex");
        let ended = succeed(
            command
                .args(images)
                .args(size)
                .arg("what is this?")
                .args(end),
        );
        let expected = tokens(&gemma, &["wide.png", "tall.png"], most, "what is this?");
        let report = report(&ended);
        assert_eq!(report["prompt_tokens"], json!(expected));
        assert_eq!(
            report["tokens"].as_array().map(Vec::len),
            Some(3),
            "{ended:?}"
        );
    }
}

#[test]
fn program_run_with_wrong_image_names_it() {
    let unified = folder(MODEL);
    let unified = unified.to_str().expect("the path is UTF-8");
    let text = folder("dense-ple");
    let text = text.to_str().expect("the path is UTF-8");
    let (wide, other) = (path("wide.png"), path("config.json"));
    for (what, model, arguments, code, words) in [
        (
            "no file",
            unified,
            &["--image", "absent.png", "hi"][..],
            1,
            &["absent.png"][..],
        ),
        (
            "no image",
            unified,
            &["--image", &other, "hi"],
            1,
            &["config.json", "PNG, JPEG or WebP"],
        ),
        (
            "no vision",
            text,
            &["--image", &wide, "hi"],
            2,
            &["sees no images"],
        ),
        (
            "size",
            unified,
            &["--image", &wide, "--image-tokens", "71", "hi"],
            2,
            &["--image-tokens", "71"],
        ),
        (
            "size without an image",
            unified,
            &["--image-tokens", "140", "hi"],
            2,
            &["--image-tokens", "without an image"],
        ),
        (
            "cache",
            unified,
            &["--image", &wide, "--cache", "session", "hi"],
            2,
            &["--cache"],
        ),
        (
            "two texts",
            unified,
            &["hi", "--prompt", "hi"],
            2,
            &["--prompt"],
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
    command.args([
        "--device",
        "flex",
        "--dtype",
        "f32",
        "--temperature",
        "0",
        "--max-tokens",
        "3",
    ]);
    command.args(["--model", &path("")]).args(arguments);
    run_with_input(&mut command, input)
}

#[test]
fn program_chat_with_image_answers_about_it() {
    let shown = chat(
        &[],
        &format!("/image {}\nwhat is this?\nand now?\n", path("wide.png")),
    );
    let blind = chat(&[], "what is this?\nand now?\n");
    assert_eq!(
        (shown.code, blind.code),
        (Some(0), Some(0)),
        "{shown:?} {blind:?}"
    );
    assert_ne!(shown.stdout, blind.stdout);
}

#[test]
fn program_chat_with_wrong_image_tokens_ends_at_once() {
    let ended = chat(&["--image-tokens", "71"], "hello\n");
    check("size", &ended, 2, &["--image-tokens", "71", "70, 140"]);
}

#[test]
fn program_chat_with_wrong_image_is_an_error() {
    let cases: [(&str, &[&str]); 2] = [
        ("/image\n", &["/image"]),
        ("/image absent.png\n", &["absent.png"]),
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
