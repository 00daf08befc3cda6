//! `cargo xtask test`: runs the whole test suite on a machine on which only Rust needs to be installed.

use crate::{
    process::{self, Result},
    setup, suite,
};
use std::process::{Command, ExitStatus};

/// Installs what the tests need, runs `cargo test` and returns its exit code.
pub fn run(args: &[String]) -> Result<u8> {
    let graphics = setup::graphics()?;
    if args.is_empty() {
        return suite::run(&|command| graphics.apply(command));
    }
    if needs_llvm(args) {
        setup::llvm_if_possible();
    }

    // Add `--workspace` only if the arguments select no packages. If a command has both `--workspace` and `--package`, cargo
    // ignores `--package` and tests everything.
    let mut command = if chooses_packages(args) {
        let mut command = process::cargo();
        command.arg("test");
        command
    } else {
        process::test_workspace()
    };
    command.args(args);
    graphics.apply(&mut command);

    let status = process::status(&mut command)?;
    exit_code(&command, status)
}

/// Returns the exit code of a command that has ended, or an error if a signal stopped the command.
fn exit_code(command: &Command, status: ExitStatus) -> Result<u8> {
    match status.code() {
        Some(code) => Ok(u8::try_from(code).unwrap_or(1)),
        None => Err(format!(
            "`{}` was stopped ({status})",
            process::display(command)
        )),
    }
}

/// Returns the arguments for cargo, which stand before `--`. The arguments after `--` are for the test programs.
fn for_cargo(args: &[String]) -> impl Iterator<Item = &str> {
    args.iter()
        .map(String::as_str)
        .take_while(|arg| *arg != "--")
}

/// True if the requested features need CubeCL's LLVM.
fn needs_llvm(args: &[String]) -> bool {
    let mut args = for_cargo(args);
    while let Some(arg) = args.next() {
        let list = match arg {
            "--all-features" => return true,
            "--features" | "-F" => args.next(),
            _ => arg
                .strip_prefix("--features=")
                .or_else(|| arg.strip_prefix("-F")),
        };
        if list.is_some_and(names_llvm_backend) {
            return true;
        }
    }
    false
}

/// True if a list of features, such as `wgpu,attention-cube/cuda`, contains a backend that links LLVM.
fn names_llvm_backend(list: &str) -> bool {
    list.split([',', ' ', '='])
        .filter_map(|feature| feature.rsplit('/').next())
        .any(|feature| matches!(feature, "cuda" | "rocm"))
}

fn chooses_packages(args: &[String]) -> bool {
    for_cargo(args).any(|arg| {
        let short = arg.starts_with("-p");
        short || arg == "--package" || arg.starts_with("--package=")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn needs_llvm_with_cuda_or_rocm_is_true() {
        for line in [
            "--features cuda",
            "--features=flex,cuda",
            "-F rocm",
            "-Frocm",
            "-F=cuda",
            "--no-default-features --features attention-cube/cuda",
            "--all-features",
        ] {
            assert!(needs_llvm(&args(line)), "{line}");
        }
        assert!(needs_llvm(&["--features".into(), "flex cuda".into()]));
    }

    #[test]
    fn needs_llvm_with_other_arguments_is_false() {
        for line in [
            "",
            "cuda",
            "--features vulkan,flex",
            "--features",
            "-- --features cuda",
        ] {
            assert!(!needs_llvm(&args(line)), "{line}");
        }
    }

    #[test]
    fn chooses_packages_with_package_option_is_true() {
        for line in ["-p xtask", "-pxtask", "--package xtask", "--package=xtask"] {
            assert!(chooses_packages(&args(line)), "{line}");
        }
        for line in ["", "--features cuda", "-- -p"] {
            assert!(!chooses_packages(&args(line)), "{line}");
        }
    }
}
