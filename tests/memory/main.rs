//! Device memory of generation and training. These tests are a separate program and run one at a time, since a device
//! counts the memory of the whole process.
//!
//! The enabled features decide the devices; `ATTENTION_TEST_DEVICES=cuda,flex` restricts them.
#![cfg(feature = "flex")]

mod training;

use attention_workspace::testing::devices::devices;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_gemma4::{Cache, Gemma4Config, Gemma4Model, LayerType, Logits};
use std::sync::{Mutex, PoisonError};

/// The lock that the running test holds.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const PROMPT: usize = 24;
const WINDOW: usize = 16;
const HEAD_DIM: usize = 64;

/// Returns a model with one sliding and one full layer, each with one key head.
fn model(device: &Device) -> Gemma4Model {
    let config = Gemma4Config {
        vocab_size: 128,
        vocab_size_per_layer_input: 128,
        hidden_size: 64,
        intermediate_size: 128,
        layer_types: vec![LayerType::Sliding, LayerType::Full],
        num_attention_heads: 2,
        sliding_head_dim: HEAD_DIM,
        global_head_dim: HEAD_DIM,
        sliding_window: WINDOW,
        num_kv_shared_layers: 0,
        hidden_size_per_layer_input: 0,
        ..Gemma4Config::e2b()
    };
    Gemma4Model::new(&config, device)
}

/// Generates `count` tokens. Returns the device's bytes in use before the decoder is dropped.
fn generate(model: &Gemma4Model, cache: &mut Cache, count: usize) -> Option<u64> {
    let device = model.device();
    let mut token = 20;
    let mut decoder = model.decoder(cache);
    for _ in 0..count {
        let next = decoder.step(&[token]).expect("the step succeeds");
        token = next.argmax().expect("there is a token")[0];
    }
    device.sync().expect("the device synchronizes");
    device.memory_pool_usage().map(|usage| usage.bytes_in_use)
}

/// The ring buffers keep their size, and the memory of a decode step is freed after the step.
#[test]
fn generation_of_long_texts_keeps_only_the_full_layers_keys() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for device in devices() {
        let model = model(&device.device);
        let mut cache = model.cache(vec![0]);
        let prompt = TensorData::new((0..PROMPT as i32).collect(), [1, PROMPT]);
        let prompt = Tensor::<2, Int>::from_data(prompt, &device.device);
        model
            .step(prompt, &mut cache, Logits::None)
            .expect("the step succeeds");
        let first = generate(&model, &mut cache, 20);
        let bytes = cache.bytes();
        let count = 2000;
        let last = generate(&model, &mut cache, count);

        let positions = PROMPT + 20 + count;
        assert_eq!(cache.len(), positions, "{}", device.name);
        // Keys and values are f32.
        let slots = WINDOW + positions.next_multiple_of(1024) + 1024;
        assert!(
            cache.bytes() <= 2 * 4 * HEAD_DIM * slots,
            "{} keeps {} bytes",
            device.name,
            cache.bytes()
        );
        if let (Some(first), Some(last)) = (first, last) {
            let grown = last.saturating_sub(first) as usize;
            let of_cache = cache.bytes() - bytes;
            // The RoPE tables grow with the positions and are kept: cosines and sines for both kinds of layers.
            let of_tables = 4 * (HEAD_DIM / 2) * 4 * 2 * positions.next_power_of_two();
            assert!(
                grown <= of_cache + of_tables,
                "{}: grew by {grown} bytes, of which the cache has {of_cache}",
                device.name
            );
        }
    }
}
