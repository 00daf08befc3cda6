//! What tests share: the devices under test, attention against its definition in f64, the programs.

pub mod case;
pub mod compare;
pub mod definition;
pub mod dense;
pub mod devices;
pub mod gguf;
pub mod inputs;
pub mod program;
pub mod run;
pub mod visible;
