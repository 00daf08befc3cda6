//! Tests the device memory that generation and training use. These tests are a separate program and run one at a time,
//! because a device counts the memory of the whole process.
//!
//! The enabled Cargo features select the devices. The environment variable `ATTENTION_TEST_DEVICES` restricts the devices,
//! for example `ATTENTION_TEST_DEVICES=cuda,flex`.
#![cfg(feature = "flex")]

mod attention;
mod audio;
mod counted;
mod training;

use attention_workspace::testing::devices::devices;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_gemma4::{Cache, Gemma4Config, Gemma4Model, LayerType, Logits};
use std::sync::{Mutex, PoisonError};

#[global_allocator]
static ALLOCATOR: counted::Counted = counted::Counted;

/// The lock that a test holds while it runs, so that the tests run one at a time.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const PROMPT: usize = 24;
const WINDOW: usize = 16;
const HEAD_DIM: usize = 64;

/// Returns a model with one sliding layer and one full layer. Each layer has one key head.
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

/// Generates `count` tokens. Returns the number of bytes of device memory in use at the end, while the decoder still exists.
/// Returns `None` if the device does not count its memory.
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

/// As the text grows, only the cache of the full layer grows. The ring buffer of the sliding layer must keep its size.
/// All other memory that a decode step allocates must be freed after the step.
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
        // The bound counts the slots (token positions) of both layers. The sliding layer has as many slots as its
        // window. For the full layer, the bound is `positions` rounded up to a multiple of 1024, plus 1024 more slots.
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
            // The RoPE tables grow with the positions and stay in memory. Each of the two kinds of layers has a table of
            // cosines and a table of sines.
            let of_tables = 4 * (HEAD_DIM / 2) * 4 * 2 * positions.next_power_of_two();
            assert!(
                grown <= of_cache + of_tables,
                "{}: grew by {grown} bytes, of which the cache has {of_cache}",
                device.name
            );
        }
    }
}
