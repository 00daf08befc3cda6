//! Trains a Gemma 4 model from scratch on text files, like the command `gemma4 train`.
//!
//! ```text
//! cargo run --release --features training --example train -- --out trained
//! cargo run --release --features training --example train -- --out trained --data texts --config 55m --steps 20000
//! cargo run --release --features training --example train -- --out trained --resume
//! ```

use clap::Parser;
use gemma4_cli::commands::Train;
use std::process::ExitCode;

fn main() -> ExitCode {
    Train::parse().execute()
}
