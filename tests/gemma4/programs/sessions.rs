//! Sessions that programs keep in a file.

use super::{Ended, greedy, program, refused, report, run, succeed, write};
use crate::fixture;
#[cfg(unix)]
use std::fs;
#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
use std::{path::Path, process::Stdio};

/// A second run reads what is new, and a chat goes on with its conversation.
#[test]
fn sessions_are_kept_in_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session.safetensors");
    let generate = |prompt: &str, model: &str| {
        let mut command = greedy(model, "flex");
        command.args([
            "--prompt-tokens",
            prompt,
            "--max-tokens",
            "4",
            "--ignore-eos",
        ]);
        command.args(["--json", "--cache"]).arg(&path);
        command
    };
    let trunk = "2,50,60,70,80,90,91,92,93,94,95,96,97,98";
    let longer = format!("{trunk},50,60");
    let first = report(&succeed(&mut generate(trunk, "dense-ple")));
    assert_eq!(first["timings"]["prefill_tokens"], 14);
    #[cfg(unix)]
    let mode = |of: &Path| fs::metadata(of).expect("a file").permissions().mode() & 0o777;
    #[cfg(unix)]
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("its owner's");
    let again = report(&succeed(&mut generate(&longer, "dense-ple")));
    #[cfg(unix)]
    assert_eq!(mode(&path), 0o640);
    // Up to its last 8 tokens the first prompt is there.
    assert_eq!(again["timings"]["prefill_tokens"], 10);
    let mut fresh = greedy("dense-ple", "flex");
    fresh.args([
        "--prompt-tokens",
        &longer,
        "--max-tokens",
        "4",
        "--ignore-eos",
        "--json",
    ]);
    assert_eq!(again["tokens"], report(&succeed(&mut fresh))["tokens"]);
    let words = ["session.safetensors", "another model"];
    let other = run(&mut generate(trunk, "dense-keqv"));
    refused::check("another model's session", &other, 1, &words);

    let path = folder.path().join("chat.safetensors");
    let chat_in = |path: &Path, arguments: &[&str], input: &[u8]| {
        let mut command = program("chat");
        command.args([
            "--device",
            "flex",
            "--temperature",
            "0",
            "--max-tokens",
            "4",
        ]);
        command.arg("--model").arg(fixture::folder("dense-ple"));
        command.args(arguments).arg("--cache").arg(path);
        let mut child = command.stdin(Stdio::piped()).spawn().expect("a process");
        write(&mut child, input);
        Ended::from(child.wait_with_output().expect("its end"))
    };
    let chat = |arguments: &[&str], input: &str| chat_in(&path, arguments, input.as_bytes());
    let first = chat(&["--system", "Be brief."], "the cat\n");
    assert_eq!(first.code, Some(0), "{first:?}");
    let second = chat(&[], "and then\n");
    assert_eq!(second.code, Some(0), "{second:?}");
    assert!(second.stderr.contains("3 messages"), "{second:?}");
    let both = chat(&["--system", "Be brief."], "/reset\nthe cat\nand then\n");
    let lines = |ended: &Ended| ended.stdout.clone();
    assert_eq!(lines(&both), lines(&first) + &lines(&second));
    let other = chat(&["--system", "Be long."], "hi\n");
    refused::check("another system", &other, 2, &["--system", "--cache"]);
    let again = chat(&[], "");
    assert!(again.stderr.contains("5 messages"), "{again:?}");
    // What cannot be read ends a chat, and loses nothing that was said.
    let broken = chat_in(&path, &[], b"go on\n\xff\n");
    assert_ne!(broken.code, Some(0), "{broken:?}");
    let again = chat(&[], "");
    assert!(again.stderr.contains("7 messages"), "{again:?}");
    // Another program goes on from the keys, and leaves the conversation alone.
    let mut generate = greedy("dense-ple", "flex");
    generate.args(["--prompt", "hi", "--max-tokens", "2", "--cache"]);
    succeed(generate.arg(&path));
    let again = chat(&[], "");
    assert!(again.stderr.contains("7 messages"), "{again:?}");

    // A chat of which nothing was said leaves what another program has read.
    let path = folder.path().join("session.safetensors");
    let nothing = chat_in(&path, &[], b"");
    assert_eq!(nothing.code, Some(0), "{nothing:?}");
    let mut generate = greedy("dense-ple", "flex");
    generate.args(["--prompt-tokens", &longer, "--max-tokens", "4"]);
    generate
        .args(["--ignore-eos", "--json", "--cache"])
        .arg(&path);
    let again = report(&succeed(&mut generate));
    assert!(
        again["timings"]["prefill_tokens"].as_u64() < Some(16),
        "{again}"
    );
}
