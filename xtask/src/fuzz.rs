//! `cargo xtask fuzz`: reads broken files of every format.

use crate::process::{self, Result};

/// How long files of one format are broken where nobody says otherwise.
const SECONDS: &str = "60";

/// Runs the fuzzing program of the tests, with `args` for it.
pub fn run(args: &[String]) -> Result<()> {
    let mut command = process::cargo();
    // As the tests are built, so that dependencies are not compiled once more.
    command.args(["test", "--release", "--workspace"]);
    command
        .args(process::programs())
        .args(["--test", "fuzz", "--"]);
    if !says_how_long(args) {
        command.args(["--seconds", SECONDS]);
    }
    process::run(command.args(args))
}

fn says_how_long(args: &[String]) -> bool {
    args.iter()
        .any(|arg| arg == "--seconds" || arg.starts_with("--seconds="))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_unless_it_is_said() {
        let args = |line: &str| -> Vec<String> { line.split(' ').map(String::from).collect() };
        for line in ["--seconds 3600", "config --seconds=5 --seed 3"] {
            assert!(says_how_long(&args(line)), "{line}");
        }
        assert!(!says_how_long(&args("config --seed 3")));
    }
}
