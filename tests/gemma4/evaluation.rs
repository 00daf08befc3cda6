//! Tests the subcommand `evaluate` and its library function. The cross entropy of a text equals the loss in Hugging
//! Face Transformers. Each token counts once, regardless of how documents are divided into windows and rows. In
//! conversations, only the trained tokens count.

use crate::{
    devices::devices,
    fixture::{self, Fixture, tokens, values},
    programs::{
        folder::Folder,
        refused::check,
        report,
        training::{conversations as lines, finetune},
    },
};
use attention_workspace::testing::program::{gemma4, run, succeed};
use burn::tensor::{DType, Device};
use burn_gemma4::Gemma4;
use gemma4_train::{
    data::{
        documents::{Document, read_documents},
        packing::Example,
    },
    evaluation::{Cost, Windows, evaluate},
};
use serde_json::Value;
use std::{fs, path::Path, process::Command};
use tempfile::TempDir;

fn document(tokens: &[u32]) -> Document {
    let example = Example {
        tokens: tokens.into(),
        learned: vec![true; tokens.len()],
        media: Vec::new(),
    };
    Document {
        line: 1,
        examples: vec![example],
    }
}

fn costs(gemma: &Gemma4, documents: &[Document], length: usize, stride: usize) -> Vec<Cost> {
    let windows = Windows { length, stride };
    evaluate(gemma, documents, windows, |_, _| ()).expect("the costs are computed")
}

fn cross_entropy(cost: Cost) -> f64 {
    cost.summary()
        .expect("at least one token counts")
        .cross_entropy
}

#[track_caller]
fn assert_close(found: f64, expected: f64, what: &str) {
    let error = (found - expected).abs();
    assert!(
        error <= 2e-4 * expected.abs(),
        "{what}: {found}, not {expected}"
    );
}

#[test]
fn evaluation_loss_equals_transformers() {
    for device in devices() {
        // On a device that runs CubeCL kernels, the same kernels compute the losses of all fixtures, so one fixture is
        // enough.
        let count = if device.name == "flex" { usize::MAX } else { 1 };
        for fixture in Fixture::all().take(count) {
            let Some(expected) = fixture.gradients() else {
                continue;
            };
            let gemma = fixture.load(&device.device, DType::F32);
            let found = costs(&gemma, &[document(&fixture.prompt)], 512, 256);
            assert_eq!(found[0].tokens, fixture.prompt.len() - 1);
            let what = format!("{} on {}", fixture.name, device.name);
            let expected = f64::from(expected["loss"].values[0]);
            assert_close(cross_entropy(found[0]), expected, &what);
        }
    }
}

/// Returns the sum of the cross entropies of the last `counted` tokens in `text`. The function computes the sum from all logits
/// in f64.
fn definition(gemma: &Gemma4, text: &[u32], counted: usize) -> f64 {
    let logits = gemma.model().forward(tokens(&[text], &gemma.device()));
    let logits = values(logits.expect("the tokens are in the vocabulary"));
    let words = gemma.config().vocab_size;
    let cost = |position: usize| {
        let row = &logits[(position - 1) * words..][..words];
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        sum.ln() - f64::from(row[text[position] as usize])
    };
    (text.len() - counted..text.len()).map(cost).sum()
}

#[test]
fn evaluation_in_windows_and_shared_rows_equals_the_definition() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let random = |count: usize, seed: u32| -> Vec<u32> {
        let token = |index: u32| 24 + (index * index * 37 + index * seed) % 290;
        std::iter::once(2)
            .chain((1..count as u32).map(token))
            .collect()
    };
    let long = random(21, 5);
    let (length, stride) = (8, 3);
    // The first window scores 7 tokens, each of the next windows scores 3 tokens, and the last window scores one token.
    // Each window after the first starts with the text's first token.
    let mut expected = definition(&gemma, &long[..8], 7);
    for (end, counted) in [(11, 3), (14, 3), (17, 3), (20, 3), (21, 1)] {
        let window = [&long[..1], &long[end - 7..end]].concat();
        expected += definition(&gemma, &window, counted);
    }
    let short = [random(3, 7), random(5, 11), random(8, 13), random(2, 17)];
    let mut documents: Vec<Document> = short.iter().map(|text| document(text)).collect();
    documents.insert(2, document(&long));
    // A document of one token has no token to predict.
    documents.push(document(&[2]));
    let found = costs(&gemma, &documents, length, stride);
    assert_eq!(
        found.iter().map(|cost| cost.tokens).collect::<Vec<_>>(),
        [2, 4, 20, 7, 1, 0]
    );
    assert_close(found[2].nats, expected, "windows");
    for (place, text) in [
        (0, &short[0]),
        (1, &short[1]),
        (3, &short[2]),
        (4, &short[3]),
    ] {
        let alone = definition(&gemma, text, text.len() - 1);
        assert_close(found[place].nats, alone, "a short document");
    }
    assert_eq!(found[5].summary(), None);
    let all: Cost = found.into_iter().sum();
    assert_eq!(all.tokens, 34);
}

fn evaluation(model: &Path, data: &Path, arguments: &[&str]) -> Command {
    let mut command = gemma4("evaluate");
    command.arg("--model").arg(model).arg("--data").arg(data);
    command.args(["--device", "flex"]).args(arguments);
    command
}

/// `evaluate` reports the cross entropy of each document and of all documents together. An adapter that `finetune` has
/// trained lowers the cross entropy. Quantized weights hardly change the cross entropy.
#[test]
fn evaluate_reports_the_validation_loss_of_finetune() {
    let base = Folder::copy("dense-ple");
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let data = path("data.jsonl");
    fs::write(&data, lines()).expect("the file is written");
    succeed(&mut finetune(&base, &data, &path("adapter"), &[]));
    let told = |arguments: &[&str]| -> Value {
        let arguments = [arguments, &["--length", "64", "--json"]].concat();
        report(&succeed(&mut evaluation(base.path(), &data, &arguments)))
    };
    let whole = told(&[]);
    let documents = whole["documents"].as_array().expect("documents is a list");
    assert_eq!(documents.len(), 200);
    assert_eq!(documents[199]["line"], 200);
    let of = |told: &Value| told["cross_entropy"].as_f64().expect("field is a number");
    // Every fifth document has the same text, so its cross entropy must be the same except for rounding. These equal
    // documents lie at different positions of their rows. At different positions, a GEMM on the CPU may add in another
    // order.
    let (first, fifth) = (of(&documents[0]), of(&documents[5]));
    let error = (first - fifth).abs();
    assert!(
        error <= 4.0 * f64::from(f32::EPSILON) * first,
        "{first} and {fifth}"
    );
    let tokens = |told: &Value| told["tokens"].as_f64().expect("the field is a number");
    let sum: f64 = documents.iter().map(|one| of(one) * tokens(one)).sum();
    assert_close(sum / tokens(&whole), of(&whole), "by tokens");
    let perplexity = whole["perplexity"].as_f64().expect("the field is a number");
    assert_close(perplexity, of(&whole).exp(), "perplexity");
    let adapter = path("adapter");
    let adapted = told(&["--adapter", adapter.to_str().expect("the path is UTF-8")]);
    assert!(of(&adapted) < 0.8 * of(&whole), "{adapted}");
    let quantized = told(&["--quantize", "q8"]);
    assert_ne!(of(&quantized), of(&whole));
    assert!((of(&quantized) - of(&whole)).abs() < 0.02 * of(&whole));

    let text = path("text.txt");
    fs::write(&text, "the cat the mat").expect("the file is written");
    let ended = succeed(&mut evaluation(base.path(), &text, &["--length", "4"]));
    let lines: Vec<&str> = ended.stdout.lines().collect();
    assert_eq!(lines.len(), 2, "{ended:?}");
    assert_eq!(
        lines[0].strip_prefix("line 1: "),
        lines[1].strip_prefix("all: ")
    );
    assert!(
        ended.stderr.contains("windows of 4 tokens, 2 apart"),
        "{ended:?}"
    );
}

#[test]
fn evaluate_wrong_arguments_are_refused() {
    let base = fixture::folder("dense-ple");
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    for name in ["text.txt", "text.csv"] {
        fs::write(path(name), "the cat").expect("the file is written");
    }
    fs::write(path("empty.txt"), "\n").expect("the file is written");
    fs::write(path("lines.jsonl"), "{\"txt\": 3}\n").expect("the file is written");
    for (name, arguments, code, words) in [
        ("text.csv", &[][..], 2, &["text.csv", ".jsonl"][..]),
        ("text.txt", &["--length", "1"], 2, &["--length is 1"]),
        (
            "text.txt",
            &["--length", "1000000"],
            2,
            &["--length is 1000000", "made for"],
        ),
        (
            "text.txt",
            &["--length", "8", "--stride", "8"],
            2,
            &["--stride is 8", "1 to 7"],
        ),
        ("text.txt", &["--stride", "0"], 2, &["--stride is 0"]),
        ("empty.txt", &[], 1, &["empty.txt", "is empty"]),
        ("absent.txt", &[], 1, &["absent.txt", "No such file"]),
        ("lines.jsonl", &[], 1, &["line 1", "\"txt\""]),
    ] {
        let ended = run(&mut evaluation(&base, &path(name), arguments));
        check(name, &ended, code, words);
    }
}

/// A text has one BOS and one EOS token, regardless of the BOS and EOS tokens that the file contains.
#[test]
fn documents_have_one_bos_and_one_eos() {
    let gemma = Fixture::open("dense-ple").load(&Device::flex(), DType::F32);
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("texts.jsonl");
    let texts = [
        "the cat",
        "<bos>the cat",
        "the cat<eos>",
        "<bos>the cat<eos>",
    ];
    let lines = texts.map(|text| format!("{{\"text\": \"{text}\"}}\n"));
    fs::write(&path, lines.concat()).expect("the file is written");
    let documents = read_documents(&path, &gemma).expect("the documents parse");
    let [first, others @ ..] = &documents[..] else {
        panic!("the file has no documents")
    };
    let example = &first.examples[0];
    assert!(example.tokens[0] == gemma.config().bos_token && !example.learned[0]);
    assert!(example.learned[1..].iter().all(|learned| *learned));
    for (document, text) in others.iter().zip(&texts[1..]) {
        assert_eq!(document.examples, first.examples, "{text}");
    }
}
