//! Runs the program `gemma4` and the examples in tests.

use std::env::{self, consts::EXE_SUFFIX};
use std::process::{Command, Output, Stdio};

/// The exit code and the output of a process that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit code; `None` if a signal ended the program.
    pub code: Option<i32>,
    /// The standard output.
    pub stdout: String,
    /// The standard error.
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        // A test may already have read a part of the output, so the remaining bytes may begin in the middle of a UTF-8
        // character.
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }
}

/// Returns the command that runs the example `name`. The command has no input, and its output is captured.
///
/// `cargo test --test …` does not build the examples, so the test runs the examples of an earlier build.
///
/// # Panics
/// Panics if the example is not built in the profile of the calling test.
pub fn example(name: &str) -> Command {
    built("examples", name, "cargo build --examples")
}

/// Returns the command that runs a subcommand of `gemma4`, such as `run`. The command has no input, and its output is captured.
///
/// Only `cargo test --workspace` is sure to build the program. Otherwise the program may come from an earlier build.
///
/// # Panics
/// Panics if the program is not built in the profile of the calling test.
pub fn gemma4(name: &str) -> Command {
    let mut command = built("", "gemma4", "cargo build -p gemma4-cli");
    command.arg(name);
    command
}

fn built(folder: &str, name: &str, build: &str) -> Command {
    let test = env::current_exe().expect("the path of this test");
    let profile = test.ancestors().nth(2).expect("a target folder");
    let path = profile.join(folder).join(format!("{name}{EXE_SUFFIX}"));
    assert!(
        path.exists(),
        "{} is not there: `{build}` builds it, in the profile of this test",
        path.display()
    );
    let mut command = Command::new(path);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs the test `test` of the calling test program in a new process with the environment variables `variables`.
///
/// # Panics
/// Panics if the test fails. The message contains `what`.
#[track_caller]
pub fn run_test_anew(test: &str, variables: &[(&str, &str)], what: &str) {
    let ended = Command::new(env::current_exe().expect("the path of this test"))
        .args(["--exact", test, "--nocapture"])
        .envs(variables.iter().copied())
        .output()
        .expect("a process");
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success() && text.contains("1 passed"),
        "{what}: {text}{}",
        String::from_utf8_lossy(&ended.stderr)
    );
}

/// Runs a program until it ends.
///
/// # Panics
/// Panics if the program does not start.
pub fn run(command: &mut Command) -> Ended {
    command.output().expect("a process").into()
}

/// Runs a program that must succeed.
///
/// # Panics
/// Panics if the program fails.
#[track_caller]
pub fn succeed(command: &mut Command) -> Ended {
    let ended = run(command);
    assert_eq!(ended.code, Some(0), "{command:?}: {ended:?}");
    ended
}
