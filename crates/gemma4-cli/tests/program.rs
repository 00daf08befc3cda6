//! Tests that run the program `gemma4` as a process. The workspace's other tests also run this program, and Cargo
//! builds the program for them only because this integration test exists.

use std::process::{Command, Output};

fn gemma4(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_gemma4"))
        .args(arguments)
        .output()
        .expect("a process")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

#[test]
fn help_lists_each_command_in_one_line() {
    let output = gemma4(&["--help"]);
    assert!(output.status.success(), "{output:?}");
    let help = text(&output.stdout);
    let commands = ["run", "chat", "embed"];
    #[cfg(feature = "serve")]
    let commands = [&commands[..], &["serve"]].concat();
    #[cfg(feature = "training")]
    let commands = [
        &commands[..],
        &["train", "finetune", "evaluate", "quantize"],
    ]
    .concat();
    for command in commands {
        let lines = help.lines().map(str::trim_start);
        let described = lines
            .filter_map(|line| line.strip_prefix(command))
            .filter(|rest| rest.starts_with("  "));
        assert_eq!(described.count(), 1, "{command}: {help}");
    }
}

#[test]
fn version_equals_that_of_the_package() {
    let output = gemma4(&["--version"]);
    assert!(output.status.success(), "{output:?}");
    let expected = concat!("gemma4 ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(text(&output.stdout), expected);
}

#[test]
fn missing_command_shows_help_and_exits_with_usage_error() {
    let output = gemma4(&[]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(text(&output.stderr).contains("Usage: gemma4"), "{output:?}");
}

#[test]
fn unknown_model_is_refused_with_its_name() {
    let cache = tempfile::TempDir::new().expect("a folder");
    let model = "no-organisation/no-model";
    // Without HF_HUB_OFFLINE, a build with the feature `download` would ask the Hub, and tests use no network.
    let output = Command::new(env!("CARGO_BIN_EXE_gemma4"))
        .args(["run", "--prompt", "hi", "--model", model])
        .env("HF_HUB_OFFLINE", "1")
        .env("HF_HOME", cache.path())
        .env_remove("HF_HUB_CACHE")
        .output()
        .expect("a process");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let error = text(&output.stderr);
    assert!(error.contains(&format!("hf download {model}")), "{error}");
    assert!(output.stdout.is_empty(), "{output:?}");
}
