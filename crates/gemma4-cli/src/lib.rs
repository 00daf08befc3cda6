//! The commands of the program `gemma4`, and the code that they share.
//!
//! Each command is a struct of arguments with a method `execute`, so that other programs can offer the same command:
//!
//! ```no_run
//! use clap::Parser;
//!
//! fn main() -> std::process::ExitCode {
//!     gemma4_cli::commands::Run::parse().execute()
//! }
//! ```
//!
//! [`Gemma4`] is the whole program with its subcommands.

pub mod cache_file;
pub mod commands;
pub mod device;
pub mod device_list;
mod dtype;
mod embedding;
mod error;
pub mod generation;
mod host_memory;
pub mod hub;
pub mod loading;
pub mod media;
pub mod mesa_layer;
pub mod messages;
pub mod model;
pub mod report;
pub mod signals;
pub mod terminal;
#[cfg(feature = "training")]
pub mod training;

pub use commands::Gemma4;
pub use dtype::Dtype;
pub use error::Error;
