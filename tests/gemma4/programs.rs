//! Tests the subcommands of `gemma4` as from a command line: their output, their exit codes, and their files.
//!
//! `cargo test --test gemma4` does not build the program, so the tests run the program of an earlier build.

mod answers;
mod audio;
mod doctor;
mod embed;
pub mod folder;
mod images;
#[cfg(feature = "training")]
mod over_quantized;
#[cfg(feature = "training")]
mod precision;
#[cfg(feature = "mpi")]
mod processes;
pub mod refused;
#[cfg(feature = "training")]
mod resumed;
mod sessions;
#[cfg(feature = "training")]
pub mod training;
mod videos;

use attention_workspace::testing::program::{Ended, gemma4, run, succeed};

use crate::devices::devices;
use crate::fixture;
use crate::text::{reference, tokens};
use folder::Folder;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Returns the command that generates greedily with the checkpoint `model`.
fn greedy(model: &str, device: &str) -> Command {
    let mut command = gemma4("run");
    command.arg("--model").arg(fixture::folder(model)).args([
        "--device",
        device,
        "--dtype",
        "f32",
        "--temperature",
        "0",
    ]);
    command
}

pub fn report(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"))
}

#[test]
fn program_generate_tokens_equal_transformers() {
    for device in devices() {
        for name in fixture::ALL {
            let reference = reference(name);
            let prompt = tokens(&reference["prompt"]);
            let prompt = prompt.iter().map(u32::to_string).collect::<Vec<_>>();
            let ended = succeed(
                greedy(name, device.name)
                    .args(["--prompt-tokens", &prompt.join(",")])
                    .args(["--max-tokens", "16", "--ignore-eos", "--json"]),
            );
            let report = report(&ended);
            assert_eq!(
                report["prompt_tokens"], reference["prompt"],
                "{name} on {}",
                device.name
            );
            assert_eq!(
                report["tokens"], reference["generated"],
                "{name} on {}",
                device.name
            );
            assert_eq!(report["device"], device.name);
        }
    }
}

/// A table of per-layer embeddings on the host does not change the generated text on standard output. The note about the table
/// goes only to standard error.
#[test]
fn program_generate_with_host_table_gives_the_same_text() {
    let with = |place| {
        let mut command = greedy("dense-ple", "flex");
        command.args(["--prompt", "hi", "--max-tokens", "6", "--ignore-eos"]);
        succeed(command.args(["--per-layer-table", place]))
    };
    let [auto, host] = ["auto", "host"].map(with);
    assert_eq!(auto.stdout, host.stdout);
    let line = "per-layer embeddings: 122.9 KB stay in the file, read by rows";
    assert!(host.stderr.contains(line), "{host:?}");
    assert!(!auto.stderr.contains("per-layer"), "{auto:?}");
}

/// On a machine without a display server, graphics drivers must not print to standard error.
#[test]
fn program_generate_without_display_prints_no_driver_errors() {
    let mut command = gemma4("run");
    command
        .env_remove("XDG_RUNTIME_DIR")
        .args(["--max-tokens", "1"]);
    let ended = succeed(&mut command);
    assert!(!ended.stderr.contains("XDG_RUNTIME_DIR"), "{ended:?}");
}

#[test]
fn program_generate_json_report_has_all_fields() {
    let ended = succeed(greedy("dense-ple", "flex").args([
        "--prompt",
        "the cat",
        "--json",
        "--max-tokens",
        "5",
    ]));
    let report = report(&ended);
    assert_eq!(report["prompt_tokens"], json!([2, 315, 280, 283, 281, 300]));
    assert_eq!(report["device"], "flex");
    assert_eq!(report["dtype"], "f32");
    assert!(report["text"].is_string());
    let tokens = report["tokens"].as_array().expect("tokens is a list").len();
    match report["finish_reason"].as_str() {
        Some("length") => assert_eq!(tokens, 5),
        Some("stop") => assert!(tokens <= 5),
        other => panic!("{other:?}"),
    }
    let timings = &report["timings"];
    for time in ["load_seconds", "prefill_seconds", "decode_seconds"] {
        assert!(
            timings[time].as_f64().is_some_and(|seconds| seconds >= 0.0),
            "{time}"
        );
    }
    assert_eq!(timings["prefill_tokens"], 6);
    assert_eq!(timings["decode_tokens"], tokens - 1);
    assert!(timings["prefill_tokens_per_second"].as_f64() > Some(0.0));
}

#[test]
fn program_generate_stop_token_ends_the_text() {
    let reference = reference("dense-ple");
    let prompt = tokens(&reference["prompt"]);
    let prompt = prompt.iter().map(u32::to_string).collect::<Vec<_>>();
    let generated = tokens(&reference["generated"]);
    let end = generated
        .iter()
        .position(|token| [1, 12, 17].contains(token));
    let end = end.expect("the reference has a stop token");
    let ended = succeed(
        greedy("dense-ple", "flex")
            .args(["--prompt-tokens", &prompt.join(","), "--json"])
            .args(["--max-tokens", "16"]),
    );
    let report = report(&ended);
    assert_eq!(tokens(&report["tokens"]), generated[..=end]);
    assert_eq!(report["finish_reason"], "stop");
}

#[test]
fn program_generate_text_is_equal_streamed_piped_and_reported() {
    let arguments = ["--max-tokens", "30", "--ignore-eos"];
    let mut command = greedy("dense-ple", "flex");
    let streamed = succeed(command.args(["--prompt", "the cat"]).args(arguments));
    assert!(streamed.stderr.contains("tokens/s"), "{streamed:?}");
    let mut command = greedy("dense-ple", "flex");
    let reported = succeed(
        command
            .args(["--prompt", "the cat", "--json"])
            .args(arguments),
    );
    let text = report(&reported)["text"]
        .as_str()
        .expect("text is a string")
        .to_owned();
    assert_eq!(streamed.stdout, text + "\n");

    for dash in [&[][..], &["--prompt", "-"]] {
        let mut command = greedy("dense-ple", "flex");
        command.args(arguments).args(dash).stdin(Stdio::piped());
        let mut child = command.spawn().expect("the process starts");
        write(&mut child, "the cat\n");
        let piped = Ended::from(child.wait_with_output().expect("the process ends"));
        assert_eq!(piped.stdout, streamed.stdout, "{piped:?}");
    }
}

/// Draft tokens change the speed of generation and the report, but not the text.
#[test]
fn program_generate_drafts_leave_the_text_unchanged() {
    let arguments = [
        "--prompt",
        "the cat the cat",
        "--max-tokens",
        "30",
        "--ignore-eos",
        "--json",
    ];
    let plain = report(&succeed(greedy("dense-ple", "flex").args(arguments)));
    assert!(plain["drafts"].is_null());
    let drafter = fixture::folder("assistant-ple");
    let drafter = drafter.to_str().expect("the path is UTF-8");
    for guessing in [
        &["--lookup"][..],
        &["--lookup", "--draft-tokens", "3"],
        &["--draft", drafter],
    ] {
        let ended = succeed(greedy("dense-ple", "flex").args(arguments).args(guessing));
        assert!(ended.stderr.contains("tokens a pass"), "{ended:?}");
        let found = report(&ended);
        assert_eq!(found["tokens"], plain["tokens"]);
        let passes = found["drafts"]["passes"].as_u64();
        let accepted = found["drafts"]["accepted"].as_u64();
        assert_eq!(
            passes
                .zip(accepted)
                .map(|(passes, accepted)| passes + accepted),
            Some(29)
        );
    }
}

#[test]
fn program_generate_seed_draws_the_same_text() {
    let draw = |seed| {
        let mut command = gemma4("run");
        command
            .arg("--model")
            .arg(fixture::folder("moe"))
            .args([
                "--device",
                "flex",
                "--prompt",
                "the",
                "--temperature",
                "3",
                "--top-k",
                "200",
            ])
            .args([
                "--max-tokens",
                "20",
                "--ignore-eos",
                "--json",
                "--seed",
                seed,
            ]);
        report(&succeed(&mut command))["tokens"].clone()
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

#[test]
fn program_generate_chat_option_renders_the_template() {
    let prompt = |arguments: &[&str]| {
        let mut command = greedy("dense-ple", "flex");
        command.args(["--prompt", "hi", "--max-tokens", "1", "--json"]);
        report(&succeed(command.args(arguments)))["prompt_tokens"].clone()
    };
    let examples = &reference("dense-ple")["tokenizer_examples"];
    let conversation = &examples["<bos><|turn>user\nhi<turn|>\n<|turn>model\n"];
    assert_eq!(prompt(&["--chat"]), *conversation);
    let instructed = prompt(&["--system", "the cat"]);
    assert!(tokens(&instructed).len() > tokens(conversation).len() + 6);
}

/// Without arguments, the program generates a text with its small trained model. The test checks only that the text is not
/// empty.
#[test]
fn program_generate_without_arguments_prints_text() {
    let ended = succeed(gemma4("run").args(["--device", "flex", "--ignore-eos"]));
    assert!(ended.stdout.trim().len() > 10, "{ended:?}");
    for word in ["the prompt is", "no --model"] {
        assert!(ended.stderr.contains(word), "{ended:?}");
    }
}

/// Returns a checkpoint whose texts never end, because it has no stop tokens and very many positions.
fn endless() -> Folder {
    let folder = Folder::copy("dense-ple");
    folder.set("config.json", "max_position_embeddings", 1 << 20);
    folder.set("generation_config.json", "eos_token_id", 1 << 20);
    folder
}

/// Starts a subcommand of `gemma4` with a checkpoint from [`endless`].
fn start(name: &str, folder: &Folder, arguments: &[&str]) -> Child {
    let mut command = gemma4(name);
    command
        .args([
            "--device",
            "flex",
            "--temperature",
            "0",
            "--max-tokens",
            "1000000",
            "--model",
        ])
        .arg(folder.path())
        .args(arguments)
        .stdin(Stdio::piped());
    command.spawn().expect("the process starts")
}

/// Runs a command with `input` as its standard input.
fn run_with_input(command: &mut Command, input: impl AsRef<[u8]>) -> Ended {
    let mut child = command
        .stdin(Stdio::piped())
        .spawn()
        .expect("the process starts");
    write(&mut child, input);
    Ended::from(child.wait_with_output().expect("the process ends"))
}

/// Writes `text` to the standard input of a program. A program that refuses its arguments exits without reading its input,
/// so a broken pipe is no error here.
fn write(child: &mut Child, text: impl AsRef<[u8]>) {
    let input = child.stdin.as_mut().expect("stdin is piped");
    match input.write_all(text.as_ref()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        written => written.expect("the process reads its input"),
    }
}

/// Waits until the process has printed at least one byte to standard output.
fn wait_for_text(child: &mut Child) {
    let output = child.stdout.as_mut().expect("stdout is piped");
    output.read_exact(&mut [0]).expect("the output is text");
}

#[cfg(unix)]
fn interrupt(child: &Child) {
    signal(child, "-INT");
}

#[cfg(unix)]
fn signal(child: &Child, signal: &str) {
    let sent = Command::new("kill")
        .args([signal, &child.id().to_string()])
        .status();
    assert!(sent.expect("kill starts").success());
}

#[cfg(unix)]
#[test]
fn program_generate_signal_saves_and_exits_with_its_code() {
    let folder = endless();
    for (name, code) in [("-INT", 130), ("-TERM", 143)] {
        let cache = folder.file(&format!("session{name}"));
        let cache_argument = cache.to_str().expect("the path is UTF-8");
        let arguments = ["--prompt", "the cat", "--cache", cache_argument];
        let mut child = start("run", &folder, &arguments);
        wait_for_text(&mut child);
        signal(&child, name);
        let ended = Ended::from(child.wait_with_output().expect("the process ends"));
        assert_eq!(ended.code, Some(code), "{ended:?}");
        assert!(ended.stderr.contains("tokens/s"), "{ended:?}");
        assert!(ended.stderr.contains("stopped"), "{ended:?}");
        assert!(cache.exists(), "{ended:?}");
    }
}

#[cfg(unix)]
#[test]
fn program_chat_ctrl_c_stops_the_answer_only() {
    let folder = endless();
    let mut child = start("chat", &folder, &[]);
    write(&mut child, "the cat\n");
    wait_for_text(&mut child);
    interrupt(&child);
    write(&mut child, "/heard?\n/exit\n");
    let ended = Ended::from(child.wait_with_output().expect("the process ends"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("/heard? is no command"), "{ended:?}");
}

#[test]
fn program_generate_closed_reader_ends_quietly() {
    let folder = endless();
    let mut child = start("run", &folder, &["--prompt", "the cat"]);
    wait_for_text(&mut child);
    drop(child.stdout.take());
    let ended = Ended::from(child.wait_with_output().expect("the process ends"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.stderr.contains("error"), "{ended:?}");
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
}

#[test]
fn program_generate_killed_leaves_the_checkpoint_unchanged() {
    let folder = endless();
    let before = folder.contents();
    for delay in [Some(5), Some(50), None] {
        let mut child = start("run", &folder, &["--prompt", "the cat"]);
        match delay {
            // The test kills the process after the delay, while the process is still starting or loading the model.
            Some(milliseconds) => std::thread::sleep(Duration::from_millis(milliseconds)),
            None => wait_for_text(&mut child),
        }
        child.kill().expect("the process can be killed");
        child.wait().expect("the process ends");
    }
    assert!(folder.contents() == before, "the checkpoint has changed");
    let mut command = gemma4("run");
    command.args([
        "--device",
        "flex",
        "--prompt",
        "the cat",
        "--max-tokens",
        "3",
        "--model",
    ]);
    succeed(command.arg(folder.path()));
}

/// Runs a chat with the lines of `input` and returns its output.
fn answers(input: &str) -> Ended {
    let mut command = gemma4("chat");
    command
        .args([
            "--device",
            "flex",
            "--temperature",
            "0",
            "--max-tokens",
            "12",
            "--model",
        ])
        .arg(fixture::folder("dense-ple"))
        .stdin(Stdio::piped());
    let mut child = command.spawn().expect("the process starts");
    write(&mut child, input);
    let ended = Ended::from(child.wait_with_output().expect("the process ends"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended
}

#[test]
fn program_chat_answers_until_exit() {
    let first = answers("the cat\n").stdout;
    assert!(!first.trim().is_empty(), "{first:?}");
    // The end of input and `/exit` end the chat, and later lines get no answers.
    assert_eq!(answers("the cat\n/exit\nthe cat\n").stdout, first);
    // After `/reset`, the same question has the same answer. Without `/reset`, the second answer depends on the first answer.
    // An empty line separates the answers, because the input is a pipe.
    let again = format!("{first}\n{first}");
    assert_eq!(answers("the cat\n/reset\nthe cat\n").stdout, again);
    assert_ne!(answers("the cat\nthe cat\n").stdout, again);
    let mistaken = answers("/rset\n\n");
    assert_eq!(mistaken.stdout, "");
    assert!(
        mistaken.stderr.contains("/rset is no command"),
        "{mistaken:?}"
    );
}
