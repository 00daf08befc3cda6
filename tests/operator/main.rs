//! Tests of the attention operator on every device of this build against the f64 reference. Each module covers one kind of
//! input or option that kernels may get wrong.
//!
//! The enabled features decide the devices; `ATTENTION_TEST_DEVICES=cuda,flex` restricts them. With
//! `ATTENTION_TEST_DTYPE=bf16`, cases that name no dtype run in bf16 instead of f32, on the devices that support it, and random
//! problems have only this dtype. The kernels that run in bf16 are not those that run in f32. The data are random but equal in
//! every run; `ATTENTION_TEST_SEED=1` draws other data.

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
mod dropout;
mod empty_rows;
mod empty_tensors;
mod errors;
mod explanation;
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
mod loops;
mod masks;
mod nn;
mod options;
mod oracle;
mod paged;
mod properties;
mod quantized;
mod ragged;
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
