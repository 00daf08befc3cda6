//! The programs of `examples/`, for tests that run them.

use std::env::{self, consts::EXE_SUFFIX};
use std::process::{Command, Output, Stdio};

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it reported.
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        // What a test has read a part of may begin within a character.
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }
}

/// The example called `name`, without input, its output captured.
///
/// `cargo test` builds the examples along with a test. `cargo test --test …` does not: it runs those that are there.
///
/// # Panics
/// Where it is not built, in the profile of the test that calls this.
pub fn program(name: &str) -> Command {
    let test = env::current_exe().expect("the path of this test");
    let profile = test.ancestors().nth(2).expect("a target folder");
    let path = profile.join("examples").join(format!("{name}{EXE_SUFFIX}"));
    assert!(
        path.exists(),
        "{} is not there: `cargo build --examples` builds it, in the profile of this test",
        path.display()
    );
    let mut command = Command::new(path);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// Runs one of the calling program's tests anew, alone in a process with these variables, which the caller knows itself by.
///
/// # Panics
/// Where it fails, naming `what`.
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

/// Runs a program to its end.
///
/// # Panics
/// Where it does not start.
pub fn run(command: &mut Command) -> Ended {
    command.output().expect("a process").into()
}

/// Runs a program that has to succeed.
///
/// # Panics
/// Where it does not.
#[track_caller]
pub fn succeed(command: &mut Command) -> Ended {
    let ended = run(command);
    assert_eq!(ended.code, Some(0), "{command:?}: {ended:?}");
    ended
}
