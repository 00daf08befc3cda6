//! What generation and training keep on a device. Tests of their own, one at a time, since the device counts what the whole process keeps.
//!
//! The devices are those of the enabled features; `ATTENTION_TEST_DEVICES=cuda,flex` restricts them.
#![cfg(feature = "flex")]

mod training;

use attention_workspace::testing::devices::devices;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_gemma4::{Cache, Gemma4Config, Gemma4Model, LayerType, Logits};
use std::sync::{Mutex, PoisonError};

/// Held by the test that runs.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const PROMPT: usize = 24;
const WINDOW: usize = 16;
const HEAD_DIM: usize = 64;

/// One sliding and one full layer, with keys of one head.
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

/// Generates `count` tokens; the device's bytes in use while the decoder is still there.
fn generate(model: &Gemma4Model, cache: &mut Cache, count: usize) -> Option<u64> {
    let device = model.device();
    let mut token = 20;
    let mut decoder = model.decoder(cache);
    for _ in 0..count {
        let next = decoder.step(&[token]).expect("a step");
        token = next.argmax().expect("a token")[0];
    }
    device.sync().expect("a device");
    device.memory_pool_usage().map(|usage| usage.bytes_in_use)
}

/// The rings stay as they are, and what a token needs is free again after it.
#[test]
fn long_texts_keep_only_their_full_layers_keys() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for device in devices() {
        let model = model(&device.device);
        let mut cache = model.cache(vec![0]);
        let prompt = TensorData::new((0..PROMPT as i32).collect(), [1, PROMPT]);
        let prompt = Tensor::<2, Int>::from_data(prompt, &device.device);
        model
            .step(prompt, &mut cache, Logits::None)
            .expect("a step");
        let first = generate(&model, &mut cache, 20);
        let bytes = cache.bytes();
        let count = 2000;
        let last = generate(&model, &mut cache, count);

        let positions = PROMPT + 20 + count;
        assert_eq!(cache.len(), positions, "{}", device.name);
        // Keys and values of f32.
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
            // Tables of rotations grow with the positions, and are kept, cosines and sines of both kinds of layers.
            let of_tables = 4 * (HEAD_DIM / 2) * 4 * 2 * positions.next_power_of_two();
            assert!(
                grown <= of_cache + of_tables,
                "{}: {grown} bytes, {of_cache} of them the cache's",
                device.name
            );
        }
    }
}
