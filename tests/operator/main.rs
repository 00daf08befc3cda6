//! Tests of the attention operator on every device of this build against the f64 reference. Each module covers one kind of
//! input or option that kernels may get wrong.
//!
//! The enabled Cargo features decide which devices are tested. Environment variables change the tests:
//!
//! - `ATTENTION_TEST_DEVICES=cuda,flex` restricts the devices.
//! - `ATTENTION_TEST_DTYPE=bf16` runs random problems, and all cases without a dtype of their own, in bf16 on the
//!   devices that support bf16.
//! - `ATTENTION_TEST_SEED=1` draws other random data. Without this variable, the data are the same in every run.

#[cfg(not(feature = "flex"))]
compile_error!("the oracle runs on Burn's flex backend: enable the feature `flex`");

use attention_workspace::testing::{case, code, compare, definition, dense, devices, inputs, run};

mod random;
mod refused;
mod workers;

mod bias_gradients;
mod biases;
mod block_masks;
mod cliffs;
mod decode;
mod determinism;
mod dropout;
mod empty_rows;
mod empty_tensors;
mod errors;
mod explanation;
mod fragment_checks;
mod fragments;
mod fusion;
mod gradcheck;
mod gradient_splits;
mod gradients;
mod graphs;
mod groups;
mod head_sizes;
mod hopper;
mod intervals;
mod large_scores;
mod large_values;
mod learned_tables;
mod loops;
mod masks;
mod nn;
mod options;
mod oracle;
mod paged;
mod properties;
mod quantized;
mod ragged;
mod ring;
mod score_mods;
mod segments;
mod settings;
mod shards;
mod sinks;
mod softcaps;
mod strides;
mod tails;
mod threads;
mod upstream;
mod varlen;
