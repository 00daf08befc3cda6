//! Running other programs.

use crate::setup;
use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::LazyLock,
};

/// A result whose error is the message to print: what was tried and what to do about it.
pub type Result<T> = std::result::Result<T, String>;

/// With what every program of the workspace is built, and one dependency graph serves all steps: MPI where it is there.
pub fn programs() -> [&'static str; 2] {
    let features = match setup::has_mpi() {
        true => "training,mpi",
        false => "training",
    };
    ["--features", features]
}

/// Where cargo has started this program: one that was built in another clone, with the same target folder, is this one's, too.
pub fn workspace_root() -> &'static Path {
    static PACKAGE: LazyLock<PathBuf> = LazyLock::new(|| {
        let started = env::var_os("CARGO_MANIFEST_DIR");
        started.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
    });
    PACKAGE.parent().unwrap_or(&PACKAGE)
}

/// The cargo that runs this program, started in the workspace root.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command
}

/// Runs `command` on this terminal and waits for it. An error means that it could not be started.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    command
        .status()
        .map_err(|error| format!("`{}` could not be started: {error}", display(command)))
}

/// Runs `command` on this terminal. Any outcome but success is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{}` failed ({status})", display(command)))
    }
}

/// What `command` prints, or `None` if it is not there or fails.
pub fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    output.status.success().then_some(text)
}

/// The command line as one would type it.
pub fn display(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_stem().unwrap_or(program.as_os_str());
    let words = std::iter::once(name).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_displayed_as_typed() {
        let mut command = Command::new("/opt/rust/bin/cargo");
        command.args(["test", "--release"]);
        assert_eq!(display(&command), "cargo test --release");
    }
}
