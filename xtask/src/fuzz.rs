//! `cargo xtask fuzz`: passes broken files of every format to the code that reads this format.

use crate::process::{self, Result};

/// The default fuzzing time per format, in seconds.
const SECONDS: &str = "60";

/// Runs the fuzzing test program with `args`.
pub fn run(args: &[String]) -> Result<()> {
    // The build uses the options of `cargo xtask test`, so that dependencies are not compiled a second time.
    let mut command = process::test_workspace();
    command.args(["--test", "fuzz", "--"]);
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
    fn says_how_long_with_seconds_option_is_true() {
        let args = |line: &str| -> Vec<String> { line.split(' ').map(String::from).collect() };
        for line in ["--seconds 3600", "config --seconds=5 --seed 3"] {
            assert!(says_how_long(&args(line)), "{line}");
        }
        assert!(!says_how_long(&args("config --seed 3")));
    }
}
