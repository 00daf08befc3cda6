//! Tests `gemma4 embed`: its lines of JSON, its input files, and its errors.

use super::{gemma4, run, succeed};
use crate::fixture::folder;
use attention_workspace::testing::program::Ended;
use burn::tensor::Device;
use burn_gemma4::{EmbedOptions, EmbeddingGemma};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

fn embed(arguments: &[&str]) -> Command {
    let mut command = gemma4("embed");
    command
        .args(["--device", "flex", "--model"])
        .arg(folder("embedding"))
        .args(arguments);
    command
}

fn lines(ended: &Ended) -> Vec<Value> {
    let lines = ended.stdout.lines();
    let lines = lines.map(|line| serde_json::from_str(line).expect("a line is JSON"));
    lines.collect()
}

fn numbers(line: &Value) -> Vec<f32> {
    let numbers = line["embedding"].as_array().expect("a list").iter();
    let numbers = numbers.map(|number| number.as_f64().expect("a number") as f32);
    numbers.collect()
}

fn expected(text: &str, options: EmbedOptions) -> Vec<f32> {
    let model = EmbeddingGemma::from_pretrained(folder("embedding"), &Device::flex());
    let model = model.expect("the model loads");
    let embeddings = model.embed(&[text], &options);
    embeddings.expect("the text embeds").remove(0)
}

#[track_caller]
fn assert_close(line: &Value, expected: &[f32]) {
    let found = numbers(line);
    assert_eq!(found.len(), expected.len());
    let mut pairs = found.iter().zip(expected);
    assert!(
        pairs.all(|(a, b)| (a - b).abs() < 1e-5),
        "{found:?} {expected:?}"
    );
}

#[test]
fn program_embed_prints_a_line_for_each_text() {
    let texts = ["--text", "the cat", "--text", "x"];
    let query = ["--prompt-name", "query", "--dimensions", "16"];
    let ended = succeed(&mut embed(&[&texts[..], &query].concat()));
    let lines = lines(&ended);
    assert_eq!(lines.len(), 2);
    let options = EmbedOptions::new().prompt("query").dimensions(16);
    for (index, (line, text)) in lines.iter().zip(["the cat", "x"]).enumerate() {
        assert_eq!(line["index"], index);
        assert_close(line, &expected(text, options.clone()));
    }
    assert!(ended.stderr.contains("2 texts"), "{ended:?}");
    assert!(ended.stderr.contains("tokens/s"), "{ended:?}");
}

#[test]
fn program_embed_reads_lines_and_jsonl() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    // These texts are more than one pass.
    let count = 1500;
    let text = |index: usize| "owl ".repeat(index % 5 + 1) + &"x".repeat(index % 3);
    let all: Vec<String> = (0..count).map(text).collect();
    fs::write(path("texts.txt"), all.join("\n") + "\n").expect("the file is writable");
    let found = lines(&succeed(&mut embed(&[&path("texts.txt")])));
    assert_eq!(found.len(), count);
    assert_eq!(found[count - 1]["index"], count - 1);
    for index in [0, 700, count - 1] {
        assert_close(&found[index], &expected(&text(index), EmbedOptions::new()));
    }

    let jsonl = [
        json!({"id": "a", "text": "the cat", "prompt_name": "Document"}),
        json!({"id": {"page": 7}, "text": "two\nlines"}),
    ];
    let jsonl: Vec<String> = jsonl.iter().map(Value::to_string).collect();
    fs::write(path("texts.jsonl"), jsonl.join("\n")).expect("the file is writable");
    let found = lines(&succeed(&mut embed(&[&path("texts.jsonl")])));
    assert_eq!(found[0]["id"], "a");
    assert_eq!(found[1]["id"], json!({"page": 7}));
    assert_close(
        &found[0],
        &expected("the cat", EmbedOptions::new().prompt("Document")),
    );
    assert_close(&found[1], &expected("two\nlines", EmbedOptions::new()));
}

/// Files as other programs write them: a byte order mark, blank lines of JSONL, and numbers beyond f64.
#[test]
fn program_embed_reads_jsonl_of_other_programs() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let path = folder.path().join("TEXTS.JSONL");
    let id = "12345678901234567890.50";
    let text =
        format!("\u{feff}{{\"id\": {id}, \"text\": \"the cat\"}}\r\n\r\n{{\"text\": \"x\"}}\n\n");
    fs::write(&path, text).expect("the file is writable");
    let ended = succeed(&mut embed(&[path.to_str().expect("UTF-8")]));
    assert!(ended.stdout.contains(&format!("\"id\":{id},")), "{ended:?}");
    let found = lines(&ended);
    assert_eq!(found.len(), 2);
    assert_close(&found[1], &expected("x", EmbedOptions::new()));
}

/// A text whose embedding is not finite is named, and the texts before it are printed.
#[test]
fn program_embed_names_the_text_that_is_not_finite() {
    let copied = crate::embedding::Copied::of("embedding-realhead");
    let model = EmbeddingGemma::from_pretrained(copied.path(), &Device::flex());
    let model = model.expect("the model loads");
    let tokens = |text: &str| {
        model
            .tokens(text, &EmbedOptions::new())
            .expect("it encodes")
    };
    let (clean, other) = (tokens("the cat"), tokens("x"));
    let poison = other.iter().find(|token| !clean.contains(token));
    let poison = poison.expect("the texts differ");
    copied.poison("language_model.embed_tokens.weight", *poison as usize);
    let mut command = gemma4("embed");
    command
        .args([
            "--device", "flex", "--text", "the cat", "--text", "x", "--text", "the cat",
        ])
        .arg("--model")
        .arg(copied.path());
    let ended = run(&mut command);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let message = "--text, number 2: text: has an embedding";
    assert!(ended.stderr.contains(message), "{ended:?}");
    assert_eq!(lines(&ended).len(), 1, "{ended:?}");
}

#[test]
fn program_embed_refuses_wrong_arguments_and_texts() {
    let folder = tempfile::tempdir().expect("a folder is creatable");
    let path = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_owned();
    fs::write(path("bad.jsonl"), "{\"text\": \"x\"}\n{\"txt\": 1}\n").expect("it is writable");
    fs::write(path("long.txt"), "x\n".to_owned() + &"x ".repeat(300)).expect("it is writable");
    for (arguments, part) in [
        (vec!["--text", "x", "--dimensions", "49"], "48"),
        (
            vec!["--text", "x", "--prompt-name", "Poem"],
            "Retrieval-query",
        ),
        (vec!["no-such-file.txt"], "no-such-file.txt"),
        (vec![&path("bad.jsonl")], "line 2"),
        (vec![&path("long.txt")], "line 2"),
    ] {
        let ended = run(&mut embed(&arguments));
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains(part), "{arguments:?}: {ended:?}");
    }
    for (arguments, part) in [
        (
            vec!["--text", "x", "--text", ""],
            "--text, number 2: is empty",
        ),
        (vec![&path("empty.txt")], "line 2: is empty"),
        (vec![&path("empty.jsonl")], "line 3: is empty"),
    ] {
        fs::write(path("empty.txt"), "x\n\ny\n").expect("it is writable");
        fs::write(
            path("empty.jsonl"),
            "{\"text\": \"x\"}\n\n{\"text\": \"\"}\n",
        )
        .expect("it is writable");
        let ended = run(&mut embed(&arguments));
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains(part), "{arguments:?}: {ended:?}");
        assert_eq!(
            lines(&ended).len(),
            1,
            "the text before is embedded: {ended:?}"
        );
    }
    let long = path("long.txt");
    let found = lines(&succeed(&mut embed(&["--truncate", &long])));
    assert_eq!(found[1]["tokens"], 96);

    let mut chat = gemma4("embed");
    chat.args(["--device", "flex", "--text", "x", "--model"])
        .arg(crate::fixture::folder("dense-ple"));
    let ended = run(&mut chat);
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains("not an embedding model"), "{ended:?}");
    let mut embedding = gemma4("run");
    embedding
        .args(["--device", "flex", "--prompt", "x", "--model"])
        .arg(crate::fixture::folder("embedding"));
    let ended = run(&mut embedding);
    assert_ne!(ended.code, Some(0));
    assert!(ended.stderr.contains("embedding model"), "{ended:?}");
}
