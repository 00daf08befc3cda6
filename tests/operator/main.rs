//! The operator on every device of this build, against the definition in f64: one module a hazard.
//!
//! The devices are those of the enabled features; `ATTENTION_TEST_DEVICES=cuda,flex` restricts them.
//! `ATTENTION_TEST_DTYPE=bf16` runs the cases that name no dtype in another one than f32, on the devices
//! that have it, and so with other kernels.
//! Data are random but the same in every run; `ATTENTION_TEST_SEED=1` draws other ones.

#[cfg(not(feature = "flex"))]
compile_error!("the oracle runs on Burn's flex backend: enable the feature `flex`");

use attention_workspace::testing::{case, compare, definition, dense, devices, inputs, run};

mod random;
mod refused;
mod workers;

mod bias_gradients;
mod biases;
mod cliffs;
mod decode;
mod determinism;
mod empty_rows;
mod empty_tensors;
mod errors;
mod explanation;
mod fragments;
mod fusion;
mod gradcheck;
mod gradients;
mod graphs;
mod groups;
mod head_sizes;
mod hopper;
mod large_scores;
mod large_values;
mod loops;
mod masks;
mod options;
mod oracle;
mod properties;
mod quantized;
mod segments;
mod settings;
mod sinks;
mod softcaps;
mod strides;
mod tails;
mod threads;
mod upstream;
