//! The program `gemma4`.

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    gemma4_cli::Gemma4::parse().execute()
}
