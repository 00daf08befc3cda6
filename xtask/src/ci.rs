//! `cargo xtask ci`: runs all checks in order and stops at the first failure.

use std::time::{Duration, Instant};

use crate::{
    aarch64, clients, fuzz, layers,
    process::{self, Result},
    setup, test,
};

struct Step {
    name: &'static str,
    run: fn() -> Result<()>,
}

const STEPS: &[Step] = &[
    Step {
        name: "formatting",
        run: formatting,
    },
    Step {
        name: "layers",
        run: layers::check,
    },
    Step {
        name: "LLVM for the cuda feature",
        run: llvm,
    },
    Step {
        name: "MPI for several processes",
        run: mpi,
    },
    Step {
        name: "clippy",
        run: || clippy(&[]),
    },
    Step {
        name: "clippy with the cuda feature",
        run: || clippy(&["--features", "cuda"]),
    },
    Step {
        name: "attention-cube without kernels",
        run: without_kernels,
    },
    Step {
        name: "cpu-gemv on ARM",
        run: aarch64::check_if_possible,
    },
    Step {
        name: "documentation",
        run: documentation,
    },
    Step {
        name: "packages",
        run: packages,
    },
    Step {
        name: "broken files",
        run: broken_files,
    },
    Step {
        name: "clients of the server",
        run: clients::check_if_possible,
    },
    // The tests run last, so that their result is at the end of the output.
    Step {
        name: "tests",
        run: tests,
    },
];

pub fn run() -> Result<()> {
    let mut times = Vec::new();
    for (index, step) in STEPS.iter().enumerate() {
        if index + 1 == STEPS.len() {
            print_times(&times);
        }
        println!("== step {}/{}: {}", index + 1, STEPS.len(), step.name);
        let start = Instant::now();
        let outcome = (step.run)();
        times.push((step.name, start.elapsed()));
        if let Err(message) = outcome {
            print_times(&times);
            return Err(format!("step `{}`: {message}", step.name));
        }
    }
    Ok(())
}

fn print_times(times: &[(&str, Duration)]) {
    println!("== times");
    for (name, time) in times {
        println!("{:8.1} s  {name}", time.as_secs_f64());
    }
    let total: Duration = times.iter().map(|(_, time)| time).sum();
    println!("{:8.1} s  in total", total.as_secs_f64());
}

fn formatting() -> Result<()> {
    process::run(process::cargo().args(["fmt", "--all", "--check"]))
        .map_err(|error| format!("{error}; run `cargo fmt --all` to fix the formatting"))
}

fn llvm() -> Result<()> {
    setup::llvm_if_possible();
    Ok(())
}

fn mpi() -> Result<()> {
    setup::mpi_if_possible();
    Ok(())
}

fn clippy(features: &[&str]) -> Result<()> {
    process::run(
        process::cargo()
            .args(["clippy", "--workspace", "--all-targets"])
            .args(process::programs())
            .args(features)
            .args(["--", "-D", "warnings"]),
    )
}

/// Checks the build of `attention-cube` that runs only on the CPU and has no kernels. All builds of the workspace
/// contain kernels, so they would miss an error that occurs only without kernels.
fn without_kernels() -> Result<()> {
    process::run(process::cargo().args([
        "check",
        "--package=attention-cube",
        "--no-default-features",
        "--features=flex",
    ]))
}

fn documentation() -> Result<()> {
    process::run(
        process::cargo()
            .args(["doc", "--workspace", "--no-deps"])
            .args(process::programs())
            .env("RUSTDOCFLAGS", "-D warnings"),
    )
}

/// Packs the crates that are published. A single command packs all of them, because a crate may depend on an
/// unpublished version of another crate. To save time, the packed crates are not built.
fn packages() -> Result<()> {
    process::run(process::cargo().args([
        "package",
        "--package=cpu-gemv",
        "--package=cube-kit",
        "--package=attention-cube",
        "--package=burn-gemma4",
        "--package=gemma4-train",
        "--package=gemma4-serve",
        "--package=gemma4-cli",
        "--no-verify",
        "--allow-dirty",
    ]))
}

/// Fuzzes each format for 10 seconds, so that all checks finish within an hour on a new machine.
fn broken_files() -> Result<()> {
    fuzz::run(&["--seconds", "10"].map(String::from))
}

fn tests() -> Result<()> {
    match test::run(&[])? {
        0 => Ok(()),
        code => Err(format!("`cargo xtask test` failed with exit code {code}")),
    }
}
