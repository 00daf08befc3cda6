//! Tests `train` and `finetune`: the losses decrease, crashed runs resume, and wrong data is refused.

use super::{
    Ended,
    folder::{Folder, Stored, tensors},
    gemma4,
    refused::check,
    report, run, succeed,
};
use crate::fixture;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::Command,
};
use tempfile::TempDir;

/// Returns the command that trains the smallest model for 20 steps on the text of the README.
pub fn train(out: &Path, arguments: &[&str]) -> Command {
    let mut command = gemma4("train");
    command
        .arg("--out")
        .arg(out)
        .args(["--data", concat!(env!("CARGO_MANIFEST_DIR"), "/README.md")])
        .args(["--config", "tiny", "--steps", "20", "--length", "32"])
        .args([
            "--batch",
            "2",
            "--learning-rate",
            "0.01",
            "--log-every",
            "1",
        ])
        .args(["--checkpoint-every", "5", "--device", "flex"])
        .args(arguments)
        // Burn restores an optimizer's state on Burn's default device, so the default must be a device that this
        // machine has.
        .env("BURN_DEVICE", "flex");
    command
}

/// Returns the losses that follow the text `kind` in the lines of a program's output, each with the number of its step.
pub fn losses(output: &str, kind: &str) -> Vec<(usize, f64)> {
    let loss = |line: &str| {
        let step = line.strip_prefix("step ")?.split('/').next()?;
        let (_, rest) = line.split_once(kind)?;
        let loss = rest.split_whitespace().next()?;
        Some((step.parse().ok()?, loss.parse().ok()?))
    };
    output.lines().filter_map(loss).collect()
}

pub fn validation(output: &str) -> Vec<(usize, f64)> {
    losses(output, "  validation loss ")
}

/// Checks that losses are equal, except for the rounding errors of sums whose terms are added in another order.
#[track_caller]
pub fn assert_same_losses(name: &str, found: &[(usize, f64)], expected: &[(usize, f64)]) {
    for ((step, expected), (_, found)) in expected.iter().zip(found) {
        let error = (found - expected).abs();
        assert!(
            error < 1e-3,
            "{name}: {found}, not {expected} in step {step}"
        );
    }
}

#[test]
fn train_killed_and_resumed_gives_the_losses_of_one_run() {
    let folder = TempDir::new().expect("a temporary folder");
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let expected = succeed(&mut train(&whole, &[]));
    let of_steps = losses(&expected.stdout, "  loss ");
    assert_eq!(of_steps.len(), 20, "{expected:?}");
    let of_validation = validation(&expected.stdout);
    let (first, last) = (of_validation[0].1, of_validation[3].1);
    assert!(last < first && last < 6.0, "{expected:?}");

    let mut child = train(&killed, &[]).spawn().expect("the process starts");
    let output = BufReader::new(child.stdout.take().expect("stdout is piped"));
    let reached = output
        .lines()
        .map(|line| line.expect("the output is text"))
        .find(|line| line.starts_with("step 12/"));
    assert!(reached.is_some());
    child.kill().expect("the process can be killed");
    child.wait().expect("the process ends");

    let resumed = succeed(&mut train(&killed, &["--resume"]));
    // Checkpoints are written in the background while the next steps run. The process is killed after step 12. The last
    // complete checkpoint is then from step 10, or from step 5 if the disk was slow.
    let of_resumed = losses(&resumed.stdout, "  loss ");
    let begun = of_steps.len() - of_resumed.len();
    assert!([5, 10].contains(&begun), "{resumed:?}");
    assert_eq!(of_resumed, of_steps[begun..], "{resumed:?}");
    assert_eq!(validation(&resumed.stdout), of_validation[begun / 5..]);
    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).expect("weights");
    assert!(weights(&whole) == weights(&killed));

    let mut command = gemma4("run");
    let model = command.args(["--device", "flex", "--prompt", "The", "--json", "--model"]);
    let generated = succeed(model.arg(&whole).args(["--max-tokens", "4"]));
    assert_eq!(report(&generated)["prompt_tokens"][0], 2);

    let again = run(&mut train(&whole, &[]));
    check("a second run", &again, 2, &["whole", "--resume"]);
    let other = run(&mut train(&whole, &["--resume", "--accumulate", "3"]));
    check(
        "another run",
        &other,
        2,
        &["rows of a step is 6", "begun with 2"],
    );
}

#[test]
fn train_on_two_devices_gives_the_losses_of_one() {
    let folder = TempDir::new().expect("a temporary folder");
    let of = |name: &str, arguments: &[&str]| {
        let out = folder.path().join(name);
        losses(&succeed(&mut train(&out, arguments)).stdout, "  loss ")
    };
    let short = ["--steps", "5", "--warmup", "5"];
    let by_layer = ["--devices", "0,0", "--checkpointing", "layers"];
    let together = of("together", &[short, by_layer].concat());
    let alone = of("alone", &[&short[..], &["--accumulate", "2"]].concat());
    assert_eq!(together.len(), 5);
    for ((_, together), (step, alone)) in together.into_iter().zip(alone) {
        assert!(
            (together - alone).abs() < 2e-3,
            "{together} and {alone} in step {step}"
        );
    }
}

#[test]
fn train_data_without_text_is_refused() {
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    fs::write(path("bytes.txt"), b"two\nlines \xFF").expect("the file is written");
    fs::write(path("empty.txt"), "\n").expect("the file is written");
    fs::write(path("short.txt"), "a few words").expect("the file is written");
    fs::create_dir(path("nothing")).expect("the folder is created");
    for (name, words) in [
        ("bytes.txt", ["bytes.txt", "line 2 is not UTF-8"]),
        ("empty.txt", ["empty.txt", "is empty"]),
        ("short.txt", ["1 row", "more text"]),
        ("nothing", ["nothing", "no text"]),
        ("absent.txt", ["absent.txt", "No such file"]),
    ] {
        let mut command = gemma4("train");
        command.arg("--out").arg(path("out")).arg("--data");
        let ended = run(command.arg(path(name)).args(["--device", "flex"]));
        check(name, &ended, 1, &words);
    }
    assert!(!path("out").exists());
}

/// Returns 200 short conversations as JSON lines.
pub fn conversations() -> String {
    let line = |number: usize| {
        let number = number % 5;
        format!(
            r#"{{"messages": [{{"role": "user", "content": "the cat {number}"}}, {{"role": "assistant", "content": "mat {number}"}}]}}"#
        ) + "\n"
    };
    (0..200).map(line).collect()
}

pub fn finetune(base: &Folder, data: &Path, out: &Path, arguments: &[&str]) -> Command {
    let mut command = gemma4("finetune");
    command.arg("--model").arg(base.path());
    command.arg("--data").arg(data).arg("--out").arg(out);
    command
        .args([
            "--length",
            "24",
            "--batch",
            "2",
            "--steps",
            "8",
            "--log-every",
            "1",
        ])
        .args(["--checkpoint-every", "2", "--device", "flex"])
        .args(["--learning-rate", "0.01", "--warmup", "1"])
        .args(arguments)
        // Burn restores an optimizer's state on Burn's default device, so the default must be a device that this
        // machine has.
        .env("BURN_DEVICE", "flex");
    command
}

fn answer(model: &Path, arguments: &[&str]) -> Ended {
    let mut command = gemma4("run");
    command.args(["--device", "flex", "--temperature", "0", "--ignore-eos"]);
    command.args([
        "--chat",
        "--prompt",
        "the cat 3",
        "--max-tokens",
        "6",
        "--json",
    ]);
    succeed(command.arg("--model").arg(model).args(arguments))
}

#[test]
fn finetune_lowers_the_loss_and_leaves_the_base_unchanged() {
    let base = Folder::copy("dense-ple");
    let before = base.contents();
    let folder = TempDir::new().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    fs::write(path("data.jsonl"), conversations()).expect("the file is written");
    let data = path("data.jsonl");

    // Two of the runs train adapters and keep the per-layer table on the host. The first run uses the default of
    // `--checkpointing`, and the run with `--merge` uses `--checkpointing layers`.
    let host = ["--per-layer-table", "host"];
    let ended = succeed(&mut finetune(&base, &data, &path("adapter"), &host));
    let losses = validation(&ended.stdout);
    assert!(losses[3].1 < 0.8 * losses[0].1, "{ended:?}");
    assert!(path("adapter").join("adapter_model.safetensors").exists());
    // The merged checkpoint must contain the per-layer table, although the table stays on the host.
    let merge = [
        "--merge",
        "--checkpointing",
        "layers",
        "--per-layer-table",
        "host",
    ];
    succeed(&mut finetune(&base, &data, &path("merged"), &merge));
    let full = ["--full", "--per-layer-table", "host"];
    let ended = run(&mut finetune(&base, &data, &path("full"), &full));
    let words = ["--per-layer-table host", "--full"];
    check("a table that cannot be trained", &ended, 2, &words);
    assert_eq!(base.contents(), before);

    let adapter = path("adapter");
    let adapter = adapter.to_str().expect("the path is UTF-8");
    let tokens = |ended: Ended| report(&ended)["tokens"].clone();
    let adapted = tokens(answer(base.path(), &["--adapter", adapter]));
    assert_eq!(adapted, tokens(answer(&path("merged"), &[])));
    assert_ne!(adapted, tokens(answer(base.path(), &[])));

    let with_adapter = |model: &Path| {
        let mut command = gemma4("run");
        command.args(["--device", "flex", "--prompt", "a", "--adapter", adapter]);
        run(command.arg("--model").arg(model))
    };
    let words = ["adapter_model.safetensors", "lora_A"];
    let other = with_adapter(&fixture::folder("moe"));
    check("an adapter of another model", &other, 1, &words);
    let config = path("adapter").join("adapter_config.json");
    let json = fs::read_to_string(&config).expect("the file is readable");
    let dora = json.replace("\"use_dora\": false", "\"use_dora\": true");
    fs::write(&config, dora).expect("the file is written");
    let words = ["adapter_config.json", "use_dora"];
    check(
        "an adapter of another kind",
        &with_adapter(base.path()),
        1,
        &words,
    );
}

/// Returns conversations that are so long that a row of a batch holds only one conversation. The conversations
/// alternate between a long answer to a short question and a short answer to a long question.
pub fn unequal_conversations() -> String {
    let line = |number: usize| {
        let (question, answer) = match number % 2 {
            0 => ("a", "the mat the cat the"),
            _ => ("the cat the mat the", "a"),
        };
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}]}}"#
        ) + "\n"
    };
    (0..40).map(line).collect()
}

/// The gradient of a step is the mean of the gradients of all tokens in the step. The division of the tokens into
/// batches and devices does not change this mean.
#[test]
fn finetune_weighs_answers_by_their_tokens() {
    let base = Folder::copy("dense-ple");
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data.jsonl");
    fs::write(&data, unequal_conversations()).expect("the file is written");
    let of = |name: &str, arguments: &[&str]| {
        let out = folder.path().join(name);
        let mut command = finetune(&base, &data, &out, &["--length", "40"]);
        let ended = succeed(command.args(arguments));
        assert!(!ended.stderr.contains("and cut"), "{ended:?}");
        // A row holds exactly one conversation, because two conversations do not fit and no conversation is cut. The 40
        // conversations therefore give 38 rows for training and 2 rows for validation.
        assert!(ended.stderr.contains("38 rows"), "{ended:?}");
        (losses(&ended.stdout, "  loss "), validation(&ended.stdout))
    };
    let (steps, validations) = of("rows", &["--batch", "2"]);
    assert_eq!(steps.len(), 8);
    for (name, arguments) in [
        ("batches", &["--batch", "1", "--accumulate", "2"][..]),
        ("devices", &["--batch", "1", "--devices", "0,0"]),
        (
            "layers",
            &[
                "--batch",
                "1",
                "--accumulate",
                "2",
                "--checkpointing",
                "layers",
            ],
        ),
    ] {
        let (of_steps, of_validations) = of(name, arguments);
        assert_same_losses(name, &of_steps, &steps);
        assert_same_losses(name, &of_validations, &validations);
    }
}

#[test]
fn finetune_malformed_line_is_refused() {
    let base = Folder::copy("dense-ple");
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data.jsonl");
    let out = folder.path().join("out");
    for (contents, words) in [
        (
            "{\"text\": \"a\"}\n\n{\"text\": ",
            &["data.jsonl: line 3", "no JSON"][..],
        ),
        ("{\"txt\": \"a\"}\n", &["line 1", "\"txt\"", "\"messages\""]),
        ("\n", &["data.jsonl", "no examples"]),
        ("\u{feff}{\"text\": \"a\"}\n", &["byte order mark"]),
        (
            "[\n {\"text\": \"a\"}\n]\n",
            &["a JSON array; expected a JSON object per line"],
        ),
    ] {
        fs::write(&data, contents).expect("the file is written");
        let ended = run(&mut finetune(&base, &data, &out, &[]));
        check(contents, &ended, 1, words);
    }
    fs::write(&data, "{\"text\": \"a\"}\n").expect("the file is written");
    let ended = run(&mut finetune(&base, &data, base.path(), &[]));
    check("the base's own folder", &ended, 2, &["--out is --model"]);
    let mut whole = finetune(&base, &data, &out, &["--merge", "--model"]);
    let ended = run(whole.arg(fixture::folder("gguf").join("dense-ple.Q8_0.gguf")));
    check("a file as a base", &ended, 2, &["--model is a file"]);
    let ended = run(&mut finetune(&base, &data, &out, &["--rank", "65"]));
    check("a rank beyond the matrices", &ended, 2, &["rank", "65"]);
}

/// The written checkpoint contains the vision and audio towers of a multimodal base checkpoint, byte for byte.
#[test]
fn finetune_keeps_the_towers_of_the_base() {
    let base = Folder::copy("dense-ple-mm-bf16");
    let towers = [
        ("model.vision_tower.patch_embedder.weight", Dtype::BF16, 2),
        ("model.audio_tower.steps", Dtype::I64, 8),
        (
            "model.embed_vision.embedding_projection.weight",
            Dtype::F32,
            4,
        ),
    ];
    base.edit(|tensors| {
        for (name, dtype, size) in towers {
            let tensor = Stored {
                dtype,
                shape: vec![3, 2],
                bytes: (1..=6 * size).collect(),
            };
            tensors.insert(name.into(), tensor);
        }
    });
    base.set(
        "config.json",
        "vision_config",
        json!({"model_type": "gemma4_vision"}),
    );
    base.write("processor_config.json", "{}");
    let before = tensors(base.path());
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data.jsonl");
    fs::write(&data, conversations()).expect("the file is written");

    for (name, arguments) in [
        ("merged", &["--merge"][..]),
        ("full", &["--full"]),
        ("cast", &["--full", "--dtype", "f32"]),
    ] {
        let out = folder.path().join(name);
        succeed(&mut finetune(&base, &data, &out, arguments));
        let after = tensors(&out);
        assert!(after.keys().eq(before.keys()), "{name}");
        for (tower, _, _) in towers {
            assert!(after[tower] == before[tower], "{name}: {tower} has changed");
        }
        let learned = "model.language_model.layers.0.self_attn.q_proj.weight";
        assert!(
            after[learned] != before[learned],
            "{name} has not changed the weights"
        );
        let config = fs::read_to_string(out.join("config.json")).expect("the file is readable");
        let config: Value = serde_json::from_str(&config).expect("the text is JSON");
        assert_eq!(config["model_type"], "gemma4", "{name}");
        assert_eq!(
            config["vision_config"]["model_type"], "gemma4_vision",
            "{name}"
        );
        let dtype = match name {
            "cast" => "float32",
            _ => "bfloat16",
        };
        assert_eq!(config["dtype"], dtype, "{name}");
        assert!(out.join("processor_config.json").exists(), "{name}");
        answer(&out, &[]);
    }
}

/// A conversation is left out if none of its tokens to learn lies within the length of a row. The position of the
/// conversation in the file does not matter.
#[test]
fn finetune_too_long_conversation_is_left_out() {
    let base = Folder::copy("dense-ple");
    let folder = TempDir::new().expect("a temporary folder");
    let data = folder.path().join("data.jsonl");
    let long = "the cat ".repeat(100);
    let line = |user: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": "{user}"}}, {{"role": "assistant", "content": "mat"}}]}}"#
        ) + "\n"
    };
    for (number, lines) in [[line("the cat"), line(&long)], [line(&long), line("a")]]
        .iter()
        .enumerate()
    {
        fs::write(&data, lines.concat()).expect("the file is written");
        let out = folder.path().join(number.to_string());
        let ended = succeed(&mut finetune(&base, &data, &out, &[]));
        assert!(
            ended
                .stderr
                .contains("1 of 2 examples have nothing to learn"),
            "{ended:?}"
        );
    }
    fs::write(&data, line(&long)).expect("the file is written");
    let ended = run(&mut finetune(
        &base,
        &data,
        &folder.path().join("none"),
        &[],
    ));
    check("nothing", &ended, 1, &["data.jsonl", "nothing to learn"]);
}
