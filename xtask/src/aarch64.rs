//! `cargo xtask aarch64`: runs the tests of `cpu-gemv` on an emulated ARM CPU. The continuous integration only checks
//! that the crate compiles for ARM.

use std::process::Command;

use crate::{
    process::{self, Result},
    setup,
};

const LINUX: &str = "aarch64-unknown-linux-gnu";

/// The targets for which the continuous integration checks `cpu-gemv`.
const TARGETS: [&str; 2] = [LINUX, "aarch64-apple-darwin"];

/// The emulated CPUs, by QEMU's names. Each CPU has another of the crate's instruction sets as its fastest.
const CPUS: [(&str, &str); 3] = [
    ("cortex-a53", "Neon"),
    ("neoverse-n1", "NeonDot"),
    ("max", "NeonI8mm"),
];

/// Runs the tests on each emulated CPU. `args` are further arguments of `cargo test`.
pub fn run(args: &[String]) -> Result<()> {
    if cfg!(target_arch = "aarch64") {
        return Err("this is an ARM machine; run `cargo test -p cpu-gemv` instead".into());
    }
    setup::aarch64()?;
    add_target(LINUX)?;
    for (cpu, isa) in CPUS {
        println!("== {cpu}");
        let test = ["test", "--package=cpu-gemv", "--target", LINUX];
        let mut command = process::cargo();
        command
            .args(test)
            .args(args)
            .env(
                "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
                setup::AARCH64_LINKER,
            )
            .env(
                "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
                setup::AARCH64_RUNNER,
            )
            .env("QEMU_CPU", cpu)
            .env("CPU_GEMV_TEST_ISA", isa);
        process::run(&mut command)?;
    }
    Ok(())
}

/// Checks that `cpu-gemv` compiles for ARM. Without a network, a target that is not installed is not checked.
pub fn check_if_possible() -> Result<()> {
    for target in TARGETS {
        if let Err(error) = add_target(target) {
            println!("{target} is not checked: {error}");
            continue;
        }
        let check = ["clippy", "--package=cpu-gemv", "--all-targets", "--target"];
        let lints = ["--", "-D", "warnings"];
        process::run(process::cargo().args(check).arg(target).args(lints))?;
    }
    Ok(())
}

/// Installs the standard library of a target, if it is missing.
fn add_target(target: &str) -> Result<()> {
    let mut query = Command::new("rustc");
    query.current_dir(process::workspace_root());
    query.args(["--print", "target-libdir", "--target", target]);
    let folder = process::output(&mut query).unwrap_or_default();
    if std::path::Path::new(folder.trim()).is_dir() {
        return Ok(());
    }
    let mut add = Command::new("rustup");
    add.current_dir(process::workspace_root());
    process::run(add.args(["target", "add", target]))
}
