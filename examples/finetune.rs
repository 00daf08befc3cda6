//! Fine-tunes a Gemma 4 checkpoint on conversations or texts, like the command `gemma4 finetune`.
//!
//! ```text
//! cargo run --release --features training --example finetune -- --model gemma-4-E2B-it --data conversations.jsonl --out adapter
//! cargo run --release --features training --example finetune -- --model gemma-4-31B-it --quantize q4 --data conversations.jsonl --out adapter
//! ```

use clap::Parser;
use gemma4_cli::commands::Finetune;
use std::process::ExitCode;

fn main() -> ExitCode {
    Finetune::parse().execute()
}
