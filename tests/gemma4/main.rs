//! Tests Gemma 4 on every device of this build. The results are compared with the results of the Python library Hugging
//! Face Transformers on the same tiny checkpoints (`tests/fixtures`). Each module tests one feature.
//!
//! The enabled Cargo features select the devices. The environment variable `ATTENTION_TEST_DEVICES` restricts the devices,
//! for example `ATTENTION_TEST_DEVICES=cuda,flex`.

#[cfg(not(feature = "flex"))]
compile_error!("models are compared on Burn's flex backend: enable the feature `flex`");

use attention_workspace::testing::devices;

mod altered;
mod fixture;

mod adapters;
mod audio;
mod batches;
mod cache;
mod computation;
mod configurations;
mod decode;
mod drafted_batches;
mod drafter;
mod drafts;
mod draws;
mod embedding;
mod endings;
#[cfg(feature = "training")]
mod evaluation;
mod experts;
mod following;
mod foreign;
mod forgetting;
mod generation;
mod gguf;
mod gradients;
mod half;
mod lengths;
mod loading;
mod marking;
mod media;
#[cfg(feature = "training")]
mod media_training;
mod mobile;
mod not_numbers;
mod packed;
mod packed_prefixes;
mod packed_prompts;
mod packing;
mod per_layer_table;
mod prefixes;
mod products;
mod programs;
mod prompt_graphs;
mod prompts;
mod qlora;
mod quantized;
mod quantized_cache;
#[cfg(feature = "training")]
mod quantizing;
mod quantizing_mixtures;
mod recorded;
mod rendered;
mod request_adapters;
mod sampling;
mod sessions;
mod templates;
mod text;
mod video;
mod vision;
mod vocabulary;
