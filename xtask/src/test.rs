//! `cargo xtask test`: the whole test suite, on a machine that has nothing but Rust.

use crate::{
    process::{self, Result},
    setup,
};

/// Sets the machine up, runs `cargo test` and returns its exit code.
pub fn run(args: &[String]) -> Result<u8> {
    let graphics = setup::graphics()?;
    if needs_llvm(args) {
        setup::llvm_if_possible();
    }

    let mut command = process::cargo();
    command.args(["test", "--release"]);
    // With both, cargo would ignore the choice of packages and test everything.
    if !chooses_packages(args) {
        command.arg("--workspace").args(process::programs());
    }
    command.args(args);
    graphics.apply(&mut command);

    let status = process::status(&mut command)?;
    match status.code() {
        Some(code) => Ok(u8::try_from(code).unwrap_or(1)),
        None => Err(format!(
            "`{}` was ended ({status})",
            process::display(&command)
        )),
    }
}

/// The arguments that are cargo's own, not the test programs'.
fn for_cargo(args: &[String]) -> impl Iterator<Item = &str> {
    args.iter()
        .map(String::as_str)
        .take_while(|arg| *arg != "--")
}

/// Whether the features asked for pull in CubeCL's LLVM.
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

/// Whether a feature list such as `wgpu,attention-cube/cuda` names a backend that links LLVM.
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
    fn every_way_to_ask_for_cuda_or_rocm_is_seen() {
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
    fn other_arguments_do_not_ask_for_llvm() {
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
    fn a_choice_of_packages_is_seen() {
        for line in ["-p xtask", "-pxtask", "--package xtask", "--package=xtask"] {
            assert!(chooses_packages(&args(line)), "{line}");
        }
        for line in ["", "--features cuda", "-- -p"] {
            assert!(!chooses_packages(&args(line)), "{line}");
        }
    }
}
