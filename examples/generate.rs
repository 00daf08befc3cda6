//! Continues a prompt with a Gemma 4 model, like the command `gemma4 run`.
//!
//! ```text
//! cargo run --release --example generate
//! cargo run --release --example generate -- --model gemma-4-E2B-it --chat --prompt "Why is the sky blue?"
//! ```

use clap::Parser;
use gemma4_cli::commands::Run;
use std::process::ExitCode;

fn main() -> ExitCode {
    Run::parse().execute()
}
