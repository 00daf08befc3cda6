//! Shared code of tests: the devices under test, the comparison of attention with its reference implementation in f64, and
//! helpers to run the programs.

pub mod case;
pub mod code;
pub mod compare;
pub mod definition;
pub mod dense;
pub mod devices;
pub mod gguf;
pub mod inputs;
pub mod program;
pub mod run;
pub mod visible;
