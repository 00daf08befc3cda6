//! Shared code of the examples, tests and benchmarks.
//!
//! The crate contains attention problems and models with random data, a timer, and helpers for tests. It also measures
//! errors against a reference implementation in f64.

pub mod accuracy;
#[cfg(test)]
mod manifest;
pub mod random;
pub mod ring;
#[cfg(feature = "flex")]
pub mod testing;
pub mod timing;
pub mod workload;

pub use gemma4_cli::{Dtype, Error, device, generation, mesa_layer, model, report};
