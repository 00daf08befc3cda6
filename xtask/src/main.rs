//! The project's own commands, run as `cargo xtask <command>`.

mod aarch64;
mod ci;
mod clients;
mod emulate;
mod fuzz;
mod kernels;
mod layers;
mod process;
mod suite;
mod test;

#[cfg(not(target_os = "linux"))]
mod elsewhere;
#[cfg(target_os = "linux")]
mod linux;

#[cfg(not(target_os = "linux"))]
use elsewhere as setup;
#[cfg(target_os = "linux")]
use linux as setup;

use std::{env, process::ExitCode};

const HELP: &str = "\
Usage: cargo xtask <command>

  test [CARGO_TEST_ARGS...]  set this machine up, then run the tests of the whole workspace
  aarch64 [CARGO_TEST_ARGS...]
                             run the tests of cpu-gemv on emulated ARM CPUs, one for each of its instruction sets
  emulate [--card NAME] [CARGO_TEST_ARGS...]
                             run the operator's CUDA tests without a GPU, as an a100, rtx3090, rtx4090, h100 or rtx5090 would
  fuzz [FORMATS...]          feed broken files to the readers, a minute for each format, or --seconds N, by --seed N
  kernels                    compile the mma engine's kernels with nvcc for cards that need not be present: docs/mma-compiled.md
  kernels --cards amd        compile the cmma and unit engines' kernels with CubeCL for AMD's cards: docs/amd-compiled.md
  llvm                       install Debian's LLVM for builds with the feature `cuda` or `rocm`
  ci                         run every check that continuous integration runs
  help                       show this text
";

/// The exit code for an invalid command line. If the command itself fails, the exit code is 1.
const USAGE_ERROR: u8 = 2;

fn main() -> ExitCode {
    let args: Vec<String> = match env::args_os()
        .skip(1)
        .map(|arg| arg.into_string())
        .collect()
    {
        Ok(args) => args,
        Err(arg) => return usage_error(&format!("the argument {arg:?} is not valid UTF-8")),
    };
    let (command, rest) = match args.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => ("help", &[][..]),
    };

    let outcome = match (command, rest) {
        ("help" | "-h" | "--help", _) => {
            print!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        ("test", args) => test::run(args).map(ExitCode::from),
        ("aarch64", args) => aarch64::run(args).map(|()| ExitCode::SUCCESS),
        ("emulate", args) => emulate::run(args).map(ExitCode::from),
        ("fuzz", args) => fuzz::run(args).map(|()| ExitCode::SUCCESS),
        ("kernels", args) => match args {
            [] => kernels::nvidia().map(|()| ExitCode::SUCCESS),
            [option, cards] if option == "--cards" && cards == "amd" => {
                kernels::amd().map(|()| ExitCode::SUCCESS)
            }
            _ => return usage_error("`kernels` takes `--cards amd`, or nothing"),
        },
        ("llvm", []) => setup::llvm().map(|()| ExitCode::SUCCESS),
        ("ci", []) => ci::run().map(|()| ExitCode::SUCCESS),
        ("llvm" | "ci", [extra, ..]) => {
            return usage_error(&format!(
                "`{command}` takes no arguments, but got `{extra}`"
            ));
        }
        _ => return usage_error(&format!("there is no command `{command}`")),
    };
    outcome.unwrap_or_else(|message| {
        eprintln!("error: {message}");
        ExitCode::FAILURE
    })
}

fn usage_error(message: &str) -> ExitCode {
    eprint!("error: {message}\n\n{HELP}");
    ExitCode::from(USAGE_ERROR)
}
