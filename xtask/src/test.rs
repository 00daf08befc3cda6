//! `cargo xtask test`: runs the whole test suite on a machine on which only Rust needs to be installed.

use crate::{
    process::{self, Result},
    setup,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    thread,
};

/// The test target that takes as long as all other test targets together.
const LONGEST: &str = "operator";

/// Installs what the tests need, runs `cargo test` and returns its exit code.
pub fn run(args: &[String]) -> Result<u8> {
    let graphics = setup::graphics()?;
    if args.is_empty() {
        return run_suite(&|command| graphics.apply(command));
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

/// Builds the whole suite, runs it and returns an exit code.
///
/// A software driver compiles kernels on one thread, so the operator's tests leave CPU cores idle. All other tests therefore
/// run at the same time.
fn run_suite(prepare: &dyn Fn(&mut Command)) -> Result<u8> {
    let cargo_test = |targets: &[&str]| {
        let mut command = process::test_workspace();
        command.args(targets);
        prepare(&mut command);
        command
    };
    process::run(&mut cargo_test(&["--no-run"]))?;

    let targets = test_targets(process::workspace_root())?;
    let mut others = vec!["--lib", "--bins", "--no-fail-fast"];
    for target in targets.iter().filter(|target| *target != LONGEST) {
        others.extend(["--test", target]);
    }
    let mut longest = cargo_test(&["--test", LONGEST]);
    let mut others = [cargo_test(&others), cargo_test(&["--doc"])];
    let (longest, others) = thread::scope(|scope| {
        let others = scope.spawn(|| others.each_mut().map(|command| (command.output(), command)));
        let status = process::status(&mut longest);
        let code = status.and_then(|status| exit_code(&longest, status));
        (code, others.join())
    });
    let others = others.map_err(|_| "the thread of the other tests panicked")?;
    let mut codes = vec![longest?];
    for (output, command) in others {
        let output = output.map_err(|error| format!("`{}`: {error}", process::display(command)))?;
        print!("{}", String::from_utf8_lossy(&output.stdout));
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        codes.push(exit_code(command, output.status)?);
    }
    Ok(codes.into_iter().find(|code| *code != 0).unwrap_or(0))
}

/// Returns the names of the workspace's test targets.
fn test_targets(root: &Path) -> Result<Vec<String>> {
    let mut names = targets_in(&root.join("tests"))?;
    for package in entries(&root.join("crates"))? {
        let folder = package.join("tests");
        if folder.is_dir() {
            names.extend(targets_in(&folder)?);
        }
    }
    names.sort();
    Ok(names)
}

/// Returns the names of the test targets in one folder. A target is a file `NAME.rs` or a folder `NAME` with a `main.rs`.
fn targets_in(folder: &Path) -> Result<Vec<String>> {
    let is_target = |path: &PathBuf| {
        path.join("main.rs").is_file() || path.extension().is_some_and(|it| it == "rs")
    };
    let stem = |path: PathBuf| {
        path.file_stem()
            .map(|stem| stem.to_string_lossy().into_owned())
    };
    let targets = entries(folder)?.into_iter().filter(is_target);
    Ok(targets.filter_map(stem).collect())
}

/// Returns the paths of a folder's entries.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).and_then(|entries| {
        entries
            .map(|entry| entry.map(|entry| entry.path()))
            .collect()
    });
    entries.map_err(|error| format!("{}: {error}", folder.display()))
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

/// Returns the arguments for cargo, which are the arguments before `--`. The arguments after `--` are for the test programs.
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
    fn test_targets_of_this_workspace_include_the_longest() {
        let names = test_targets(process::workspace_root()).unwrap();
        for name in [LONGEST, "fuzz", "gemma4", "memory", "program"] {
            assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
        }
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
