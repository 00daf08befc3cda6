//! Runs other programs.

use crate::setup;
use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::LazyLock,
};

/// A result whose error is the message that the program prints. The message says what failed and how to fix it.
pub type Result<T> = std::result::Result<T, String>;

/// Returns the cargo options that select all programs of the workspace, with MPI if MPI is installed. All steps use the
/// same features, because other features would make cargo compile the dependencies a second time.
pub fn programs() -> [&'static str; 2] {
    let features = match setup::has_mpi() {
        true => "training,mpi",
        false => "training",
    };
    ["--features", features]
}

/// Returns the cargo command that tests the whole workspace, including all programs.
pub fn test_workspace() -> Command {
    let mut command = cargo();
    command.args(["test", "--workspace"]).args(programs());
    command
}

/// Returns the root of the workspace in which cargo started this program. This may not be the workspace in which the
/// program was built, because clones that share a target folder also share this program.
pub fn workspace_root() -> &'static Path {
    static PACKAGE: LazyLock<PathBuf> = LazyLock::new(|| {
        let started = env::var_os("CARGO_MANIFEST_DIR");
        started.map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
    });
    PACKAGE.parent().unwrap_or(&PACKAGE)
}

/// Returns the folder of cargo's build artifacts.
pub fn target_folder() -> PathBuf {
    let folder = env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    workspace_root().join(folder)
}

/// Returns a command that runs cargo in the workspace root. If cargo started this program, the same cargo is used.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command
}

/// Runs `command` with this terminal's input and output, and waits until it ends. Returns an error only if the command cannot
/// be started.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    command
        .status()
        .map_err(|error| format!("`{}` could not be started: {error}", display(command)))
}

/// Runs `command` with this terminal's input and output. Returns an error if the command fails.
pub fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{}` failed ({status})", display(command)))
    }
}

/// Returns the output of `command`, or `None` if the command is missing or fails.
pub fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    output.status.success().then_some(text)
}

/// Returns the command line as a user would type it.
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
    fn display_of_command_is_as_typed() {
        let mut command = Command::new("/opt/rust/bin/cargo");
        command.args(["test", "--release"]);
        assert_eq!(display(&command), "cargo test --release");
    }
}
