//! Tests how the programs handle answers. Thoughts and tool calls are separated from the answer. Options end texts and
//! change the probabilities of tokens. Ctrl-C ends the prefill.

use super::folder::{Folder, WRITING, written};
use super::{Ended, endless, gemma4, greedy, refused, report, run, run_with_input, succeed, write};
use crate::fixture;
use serde_json::{Value, json};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Returns a checkpoint that thinks, answers and calls a tool. Its chat template refuses thoughts in earlier messages, and
/// renders the word "think" if thinking is requested.
fn thinker() -> Folder {
    let folder = Folder::that_writes(&WRITING);
    let template = "{{ bos_token }}{% for message in messages %}\
         {% if message.role == 'assistant' and message.content != 'bc' %}{{ raise_exception('history: ' ~ message.content) }}{% endif %}\
         {{ message.content }}{% endfor %}{% if enable_thinking %}think{% endif %}x";
    folder.write("chat_template.jinja", template);
    folder
}

fn on(name: &str, folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = gemma4(name);
    command
        .args(["--device", "flex", "--model"])
        .arg(folder.path())
        .args(arguments);
    if !arguments.contains(&"--temperature") {
        command.args(["--temperature", "0"]);
    }
    command
}

#[test]
fn program_generate_prints_the_answer_without_thoughts() {
    let folder = thinker();
    let ended = succeed(&mut on("run", &folder, &["--chat", "--prompt", "hi"]));
    assert_eq!(ended.stdout, format!("{}\n", written::ANSWER), "{ended:?}");
    let apart = format!(
        "[thought]\n{}\n[answer]\n[tool call]\n{}\n",
        written::THOUGHTS,
        written::TOOL_CALL
    );
    assert!(ended.stderr.contains(&apart), "{ended:?}");

    let ended = succeed(&mut on(
        "run",
        &folder,
        &["--chat", "--prompt", "hi", "--json"],
    ));
    let report = report(&ended);
    assert_eq!(report["text"], written::ANSWER);
    assert_eq!(report["thoughts"], written::THOUGHTS);
    assert_eq!(report["tool_calls"], json!([written::TOOL_CALL]));
    assert_eq!(report["finish_reason"], "stop");
}

fn chat(folder: &Folder, arguments: &[&str], input: &str) -> Ended {
    let mut command = on("chat", folder, arguments);
    run_with_input(&mut command, input)
}

#[test]
fn program_chat_history_has_no_thoughts() {
    let folder = thinker();
    let ended = chat(&folder, &[], "hi\nand\nthen\n");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let answers = vec![format!("{}\n", written::ANSWER); 3];
    assert_eq!(ended.stdout, answers.join("\n"));
    assert_eq!(ended.stderr.matches("[thought]").count(), 3, "{ended:?}");
}

#[test]
fn program_thinking_option_reaches_the_template() {
    let folder = thinker();
    let prompt = |arguments: &[&str]| {
        let mut all = vec!["--prompt", "hi", "--json"];
        all.extend(arguments);
        report(&succeed(&mut on("run", &folder, &all)))["prompt_tokens"].clone()
    };
    let off = prompt(&["--chat"]);
    let on = prompt(&["--chat", "--thinking", "on"]);
    assert_eq!(prompt(&["--thinking", "off"]), off);
    assert_eq!(prompt(&["--thinking", "on"]), on);
    assert_ne!(on, off);
    for (switch, code) in [("on", 0), ("off", 0), ("perhaps", 2)] {
        let ended = chat(&folder, &["--thinking", switch], "hi\n");
        assert_eq!(ended.code, Some(code), "{ended:?}");
    }
}

#[test]
fn program_message_with_special_tokens_cannot_end_its_turn() {
    let folder = Folder::copy("dense-ple");
    let prompt = |arguments: &[&str]| -> Vec<Value> {
        let mut all = vec![
            "--chat",
            "--max-tokens",
            "1",
            "--json",
            "--prompt",
            "hi<turn|>",
        ];
        all.extend(arguments);
        let report = report(&succeed(&mut on("run", &folder, &all)));
        report["prompt_tokens"]
            .as_array()
            .expect("tokens is a list")
            .clone()
    };
    let ends = |prompt: &[Value]| prompt.iter().filter(|token| **token == 12).count();
    assert_eq!(ends(&prompt(&[])), 1);
    assert_eq!(ends(&prompt(&["--special-tokens"])), 2);
}

#[test]
fn program_generation_options_are_obeyed() {
    let folder = Folder::that_writes(&[304, 281, 282, 283, 284]);
    let tokens_after = |prompt: &str, arguments: &[&str]| {
        let mut all = vec!["--max-tokens", "4", "--json", "--prompt", prompt];
        all.extend(arguments);
        report(&succeed(&mut on("run", &folder, &all)))
    };
    let tokens = |arguments: &[&str]| tokens_after("x", arguments);
    assert_eq!(tokens(&[])["text"], "abcd");
    let stopped = tokens(&["--stop", "zz", "--stop", "bc"]);
    assert_eq!(stopped["text"], "abc");
    assert_eq!(stopped["finish_reason"], "stop");
    // Without a penalty, the token after `b` is `c`. With a repetition penalty, `c` becomes less probable, because the
    // prompt contains `c`. The token after `b` is then `a`.
    let penalty = ["--repetition-penalty", "1000000"];
    assert_eq!(tokens_after("cxb", &[])["text"], "cddd");
    let penalized = tokens_after("cxb", &penalty);
    let penalized = penalized["text"].as_str().expect("text is a string");
    assert!(penalized.starts_with('a'), "{penalized}");
    assert_eq!(
        tokens(&["--temperature", "50", "--min-p", "1", "--seed", "1"])["text"],
        "abcd"
    );
    let told = tokens(&["--logprobs", "2"]);
    let logprobs = told["logprobs"]
        .as_array()
        .expect("the report has logprobs");
    assert_eq!(logprobs.len(), 4);
    for (logprob, token) in logprobs.iter().zip([281, 282, 283, 284]) {
        assert_eq!(logprob["top"][0][0], token, "{told}");
        assert_eq!(
            logprob["top"]
                .as_array()
                .expect("the field is a list")
                .len(),
            2
        );
        assert!(
            logprob["logprob"].as_f64().expect("the field is a number") > -0.01,
            "{told}"
        );
    }
    assert!(tokens(&[]).get("logprobs").is_none());
    let ended = succeed(&mut on(
        "run",
        &folder,
        &["--prompt", "x", "--max-tokens", "4", "--logprobs", "1"],
    ));
    assert_eq!(ended.stdout, "abcd\n");
    assert!(ended.stderr.contains("\"b\" "), "{ended:?}");

    // Without arguments, the defaults of the checkpoint's `generation_config.json` apply.
    for (field, value, text) in [
        ("stop_strings", json!(["ab"]), "ab"),
        ("suppress_tokens", json!([282]), "aa"),
        ("repetition_penalty", json!(1.0), "abcd"),
    ] {
        folder.set("generation_config.json", field, value);
        let found = tokens(&[])["text"]
            .as_str()
            .expect("text is a string")
            .to_owned();
        assert!(found.starts_with(text), "{field}: {found}");
        folder.set("generation_config.json", field, Value::Null);
    }
}

#[test]
fn program_prompt_with_bos_keeps_one_bos() {
    let folder = Folder::copy("dense-ple");
    let prompt = |text: &str| {
        let mut command = on(
            "run",
            &folder,
            &["--max-tokens", "1", "--json", "--prompt", text],
        );
        report(&succeed(&mut command))["prompt_tokens"].clone()
    };
    assert_eq!(prompt("<bos>hi"), json!([2, 288, 289]));
    assert_eq!(prompt("hi"), json!([2, 288, 289]));
}

/// Starts a program with a prompt whose prefill takes minutes, and interrupts the program with Ctrl-C during the prefill.
#[cfg(unix)]
fn reading(name: &str, folder: &Folder, arguments: &[&str]) -> Child {
    let mut command = on(name, folder, arguments);
    let mut child = command
        .stdin(Stdio::piped())
        .spawn()
        .expect("the process starts");
    write(&mut child, &("a".repeat(400_000) + "\n"));
    if name == "run" {
        drop(child.stdin.take());
    }
    // After five seconds, the program has loaded the model and is prefilling the prompt.
    thread::sleep(Duration::from_secs(5));
    assert!(child.try_wait().expect("its state").is_none());
    super::interrupt(&child);
    child
}

#[cfg(unix)]
#[test]
fn program_ctrl_c_ends_the_prefill() {
    let folder = endless();
    let start = Instant::now();
    let child = reading("run", &folder, &[]);
    let ended = Ended::from(child.wait_with_output().expect("the process ends"));
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert_eq!(ended.stdout, "\n", "{ended:?}");
    assert!(ended.stderr.contains("stopped"), "{ended:?}");

    let kept = tempfile::tempdir().expect("a temporary folder");
    let path = kept.path().join("session");
    let path = path.to_str().expect("the path is UTF-8");
    let mut child = reading("chat", &folder, &["--cache", path]);
    write(&mut child, "/heard?\n/exit\n");
    let ended = Ended::from(child.wait_with_output().expect("the process ends"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("/heard? is no command"), "{ended:?}");
    // A message without an answer is not part of the conversation.
    let mut again = on("chat", &folder, &["--cache", path]);
    let mut child = again
        .stdin(Stdio::piped())
        .spawn()
        .expect("the process starts");
    write(&mut child, "");
    let again = Ended::from(child.wait_with_output().expect("the process ends"));
    assert!(again.stderr.contains("0 messages"), "{again:?}");
    assert!(
        start.elapsed() < Duration::from_secs(120),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn program_message_refused_by_the_template_is_explained() {
    let folder = thinker();
    folder.write(
        "chat_template.jinja",
        "{{ raise_exception('no <turn|> today') }}",
    );
    let ended = run(&mut on("run", &folder, &["--chat", "--prompt", "hi"]));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("no <turn|> today"), "{ended:?}");
}

/// If the model has only thought about a message and has not answered, the message is not part of the conversation.
#[test]
fn program_chat_thought_without_answer_is_not_kept() {
    let folder = thinker();
    let kept = tempfile::tempdir().expect("a temporary folder");
    let path = kept.path().join("session");
    let path = path.to_str().expect("the path is UTF-8");
    let chat = |input: &str| {
        let arguments = ["--thinking", "on", "--max-tokens", "2", "--cache", path];
        let mut command = on("chat", &folder, &arguments);
        run_with_input(&mut command, input)
    };
    let first = chat("hi\nand\n");
    assert_eq!(first.code, Some(0), "{first:?}");
    let again = chat("");
    assert!(again.stderr.contains("0 messages"), "{again:?}");
}

/// If the command line requests sampling, the checkpoint's options such as `top_k` apply, even if the checkpoint's default
/// is greedy decoding.
#[test]
fn program_sampling_uses_the_checkpoints_options() {
    let folder = Folder::copy("dense-ple");
    folder.set("generation_config.json", "do_sample", false);
    folder.set("generation_config.json", "top_k", 1);
    let tokens = |arguments: &[&str]| {
        let fixed = ["--prompt-tokens", "2,50,60", "--max-tokens", "6", "--json"];
        let mut command = on("run", &folder, &[&fixed[..], arguments].concat());
        report(&succeed(&mut command))["tokens"].clone()
    };
    let greedy = tokens(&["--temperature", "0"]);
    assert_eq!(tokens(&["--temperature", "50", "--seed", "1"]), greedy);
    let others = tokens(&["--temperature", "50", "--seed", "1", "--top-k", "300"]);
    assert_ne!(others, greedy);
}

/// If a text reaches the model's last position, the program ends the text with a note. The fixture has 512 positions, and the
/// prompt has 505 tokens.
#[test]
fn program_end_of_positions_is_reported() {
    let prompt = vec!["50"; 505].join(",");
    let mut command = greedy("dense-ple", "flex");
    command.args([
        "--max-tokens",
        "400",
        "--ignore-eos",
        "--prompt-tokens",
        &prompt,
    ]);
    let ended = succeed(&mut command);
    assert!(
        ended.stderr.contains("512 positions are used up"),
        "{ended:?}"
    );
}

#[test]
fn program_compact_keys_without_effect_are_reported() {
    for (model, is_named) in [("dense-ple", true), ("dense-keqv", false)] {
        let mut command = greedy(model, "flex");
        command.args(["--prompt", "hi", "--max-tokens", "2", "--compact-keys"]);
        let ended = succeed(&mut command);
        assert_eq!(
            ended.stderr.contains("--compact-keys"),
            is_named,
            "{ended:?}"
        );
    }
}

#[test]
fn program_has_a_version_and_a_debug_log() {
    for name in ["run", "chat"] {
        let ended = succeed(gemma4(name).arg("--version"));
        assert!(
            ended.stdout.contains(env!("CARGO_PKG_VERSION")),
            "{ended:?}"
        );
    }
    let mut command = greedy("dense-ple", "cpu");
    command.args(["--prompt", "hi", "--max-tokens", "2"]);
    let ended = succeed(command.env("RUST_LOG", "debug"));
    assert!(ended.stderr.contains("DEBUG"), "{ended:?}");
}

#[test]
fn program_model_name_of_the_hub_error_says_how_to_download() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut command = gemma4("run");
    command.args([
        "--device",
        "flex",
        "--model",
        "google/gemma-4-E2B-it",
        "--prompt",
        "hi",
    ]);
    let ended = run(command
        .current_dir(folder.path())
        .env("HF_HUB_CACHE", folder.path())
        .env("HF_HUB_OFFLINE", "1"));
    refused::check(
        "no model",
        &ended,
        2,
        &["hf download google/gemma-4-E2B-it"],
    );
    let mut command = gemma4("run");
    command.args(["--device", "flex", "--prompt", "hi", "--model"]);
    command.arg(fixture::folder("dense-ple").join("model.safetensors"));
    refused::check("a file", &run(&mut command), 2, &["--model", "folder"]);
}
