//! Tests the sessions that programs keep in a file.

#[cfg(unix)]
use super::signal;
use super::{Ended, gemma4, greedy, refused, report, run, run_with_input, succeed, write};
use crate::fixture;
#[cfg(unix)]
use gemma4_cli::signals::ignores_hang_up;
#[cfg(unix)]
use std::fs;
#[cfg(unix)]
use std::os::unix::fs::PermissionsExt;
#[cfg(unix)]
use std::thread;
use std::{
    io::Read,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, SystemTime},
};

/// With a session file, a second `run` prefills only the tokens that the file does not contain. A second chat continues
/// the conversation of the first chat.
#[test]
fn program_session_file_is_continued() {
    let folder = tempfile::tempdir().expect("a temporary folder");
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
    let mode = |of: &Path| fs::metadata(of).expect("file exists").permissions().mode() & 0o777;
    #[cfg(unix)]
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640))
        .expect("the owner may set permissions");
    let again = report(&succeed(&mut generate(&longer, "dense-ple")));
    #[cfg(unix)]
    assert_eq!(mode(&path), 0o640);
    // Both prompts begin with the same 14 tokens. The session goes back to its checkpoint, which is 8 tokens before the
    // end of the first prompt. The session thus keeps the 6 tokens before the checkpoint. The second prompt has 16
    // tokens, so 10 tokens remain to prefill.
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
        let mut command = gemma4("chat");
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
        run_with_input(&mut command, input)
    };
    let chat = |arguments: &[&str], input: &str| chat_in(&path, arguments, input.as_bytes());
    let first = chat(&["--system", "Be brief."], "the cat\n");
    assert_eq!(first.code, Some(0), "{first:?}");
    let second = chat(&[], "and then\n");
    assert_eq!(second.code, Some(0), "{second:?}");
    assert!(second.stderr.contains("3 messages"), "{second:?}");
    let both = chat(&["--system", "Be brief."], "/reset\nthe cat\nand then\n");
    let lines = |ended: &Ended| ended.stdout.clone();
    assert_eq!(lines(&both), lines(&first) + "\n" + &lines(&second));
    let other = chat(&["--system", "Be long."], "hi\n");
    refused::check("another system", &other, 2, &["--system", "--cache"]);
    let again = chat(&[], "");
    assert!(again.stderr.contains("5 messages"), "{again:?}");
    // Input that is not UTF-8 ends a chat. The session file keeps the conversation up to that input.
    let broken = chat_in(&path, &[], b"go on\n\xff\n");
    assert_ne!(broken.code, Some(0), "{broken:?}");
    let again = chat(&[], "");
    assert!(again.stderr.contains("7 messages"), "{again:?}");
    // The command `run` may reuse the chat's keys and values for its own prompt, but must not change the conversation
    // in the session file.
    let mut generate = greedy("dense-ple", "flex");
    generate.args(["--prompt", "hi", "--max-tokens", "2", "--cache"]);
    succeed(generate.arg(&path));
    let again = chat(&[], "");
    assert!(again.stderr.contains("7 messages"), "{again:?}");

    // A chat that ends without messages does not change the session that the command `run` has saved.
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

/// Returns the command of a chat with a fixture's model and the session file `cache`.
fn chat_with(cache: &Path) -> Command {
    let mut command = gemma4("chat");
    command.args(["--device", "flex", "--temperature", "0"]);
    command.args(["--max-tokens", "4", "--model"]);
    command.arg(fixture::folder("dense-ple"));
    command.arg("--cache").arg(cache).stdin(Stdio::piped());
    command
}

/// Reads one line from the chat's standard output.
fn answer(child: &mut Child) -> String {
    line(child.stdout.as_mut().expect("stdout is piped"))
}

/// Reads one line, byte by byte, so that the bytes after the line stay in the pipe.
fn line(pipe: &mut impl Read) -> String {
    let (mut line, mut byte) = (Vec::new(), [0]);
    while pipe.read(&mut byte).expect("the pipe is readable") == 1 && byte != *b"\n" {
        line.push(byte[0]);
    }
    String::from_utf8_lossy(&line).into_owned()
}

fn modified(path: &Path) -> SystemTime {
    let metadata = std::fs::metadata(path).expect("the file exists");
    metadata.modified().expect("the system has the time")
}

/// Reads lines from the chat's standard error until a line says that the chat has read its session file.
fn wait_until_resumed(child: &mut Child) {
    let notes = child.stderr.as_mut().expect("stderr is piped");
    loop {
        let note = line(notes);
        assert!(!note.is_empty(), "the chat ended before it read its file");
        if note.starts_with("resuming") {
            return;
        }
    }
}

#[cfg(unix)]
#[test]
fn program_chat_ended_by_a_signal_keeps_its_answers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut signals = vec![("-INT", 130), ("-TERM", 143)];
    if !ignores_hang_up() {
        signals.push(("-HUP", 129));
    }
    for (name, code) in signals {
        let path = folder.path().join(format!("chat{name}"));
        let mut child = chat_with(&path).spawn().expect("the process starts");
        write(&mut child, "the cat\n");
        answer(&mut child);
        // The input stays open, so only the signal can end the chat. A signal may stop only the current answer, so the loop
        // repeats the signal until the chat ends.
        let input = child.stdin.take();
        while child
            .try_wait()
            .expect("the process can be polled")
            .is_none()
        {
            signal(&child, name);
            thread::sleep(Duration::from_millis(50));
        }
        drop(input);
        let ended = Ended::from(child.wait_with_output().expect("the process ends"));
        assert_eq!(ended.code, Some(code), "{ended:?}");
        assert!(path.exists(), "{ended:?}");
        let again = run(&mut chat_with(&path));
        assert!(again.stderr.contains("2 messages"), "{again:?}");
    }
}

#[test]
fn program_two_chats_of_one_file_keep_both_conversations() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("chat");
    let mut earlier = chat_with(&path).spawn().expect("the process starts");
    write(&mut earlier, "hello\n");
    let earlier = Ended::from(earlier.wait_with_output().expect("the process ends"));
    assert_eq!(earlier.code, Some(0), "{earlier:?}");
    // Both chats read the session file before either chat writes the file.
    let mut chats = [(); 2].map(|()| chat_with(&path).spawn().expect("the process starts"));
    chats.iter_mut().for_each(wait_until_resumed);
    for (count, child) in chats.iter_mut().enumerate() {
        let before = modified(&path);
        for _ in 0..=count {
            write(child, "hello\n");
            answer(child);
        }
        // A chat prints its answer before it writes the file.
        for _ in 0..4000 {
            if count > 0 || modified(&path) != before {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let [first, second] =
        chats.map(|child| Ended::from(child.wait_with_output().expect("the process ends")));
    assert_eq!(first.code, Some(0), "{first:?}");
    assert_eq!(second.code, Some(1), "{second:?}");
    assert!(second.stderr.contains("another program"), "{second:?}");
    for (name, messages) in [("chat", "4 messages"), ("chat-2", "6 messages")] {
        let again = run(&mut chat_with(&folder.path().join(name)));
        assert!(again.stderr.contains(messages), "{name}: {again:?}");
    }
}

#[test]
fn program_cache_path_that_is_not_writable_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let absent = folder.path().join("no/such/file");
    for (path, word) in [
        (absent.as_path(), "cannot be written"),
        (folder.path(), "is a folder"),
    ] {
        let mut command = greedy("dense-ple", "flex");
        command.args(["--prompt", "hi", "--cache"]).arg(path);
        refused::check("no cache", &run(&mut command), 2, &["--cache", word]);
    }
}

#[cfg(unix)]
#[test]
fn program_cache_link_is_followed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [there, link] = ["there", "link"].map(|name| folder.path().join(name));
    // The target of the symbolic link does not exist yet. The program must create the target and keep the link.
    std::os::unix::fs::symlink("there", &link).expect("the link is created");
    for _ in 0..2 {
        let mut command = greedy("dense-ple", "flex");
        command.args(["--prompt", "hi", "--max-tokens", "2", "--cache"]);
        succeed(command.arg(&link));
        assert!(link.is_symlink() && there.is_file());
    }
}
