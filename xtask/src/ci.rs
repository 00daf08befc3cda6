//! `cargo xtask ci`: every check, in order, up to the first that fails.

use std::time::{Duration, Instant};

use crate::{
    fuzz,
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
    // Last, so that the output ends with the verdict on the tests.
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
    println!("{:8.1} s  in all", total.as_secs_f64());
}

fn formatting() -> Result<()> {
    process::run(process::cargo().args(["fmt", "--all", "--check"]))
        .map_err(|error| format!("{error}; `cargo fmt --all` puts it right"))
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

fn documentation() -> Result<()> {
    process::run(
        process::cargo()
            .args(["doc", "--workspace", "--no-deps"])
            .args(process::programs())
            .env("RUSTDOCFLAGS", "-D warnings"),
    )
}

/// Packs what is published. Named in one command, the packages may depend on each other's
/// unpublished versions; they are not built again from the archives, since that would compile every
/// dependency once more.
fn packages() -> Result<()> {
    process::run(process::cargo().args([
        "package",
        "--package=cube-kit",
        "--package=attention-cube",
        "--package=burn-gemma4",
        "--no-verify",
        "--allow-dirty",
    ]))
}

/// Half of what `cargo xtask fuzz` takes: the checks are to be done within an hour on a new machine.
fn broken_files() -> Result<()> {
    fuzz::run(&["--seconds", "30"].map(String::from))
}

fn tests() -> Result<()> {
    match test::run(&[])? {
        0 => Ok(()),
        code => Err(format!("`cargo xtask test` failed with exit code {code}")),
    }
}
