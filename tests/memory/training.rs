//! Tests the memory that the forward with an adapter keeps for its backward. The table in `docs/adapters.md` gives the expected
//! sizes.

use super::ONE_AT_A_TIME;
use attention_workspace::testing::devices::devices;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_gemma4::{Adapter, Gemma4Config, Gemma4Model, LayerType, Logits};
use std::sync::PoisonError;

const POSITIONS: usize = 128;
const HIDDEN: usize = 256;
const INSIDE: usize = 1024;
const HEADS: usize = 4;
const HEAD_DIM: usize = 64;
const LAYERS: usize = 2;

fn model(device: &Device) -> Gemma4Model {
    let config = Gemma4Config {
        vocab_size: 128,
        vocab_size_per_layer_input: 128,
        hidden_size: HIDDEN,
        intermediate_size: INSIDE,
        layer_types: vec![LayerType::Full; LAYERS],
        num_attention_heads: HEADS,
        sliding_head_dim: HEAD_DIM,
        global_head_dim: HEAD_DIM,
        num_kv_shared_layers: 0,
        hidden_size_per_layer_input: 0,
        ..Gemma4Config::e2b()
    };
    let model = Gemma4Model::new(&config, device);
    Adapter::new(2, 4.0)
        .attach(model)
        .expect("the adapter is valid")
}

/// Returns the number of bytes that a forward keeps in device memory until its backward. Returns `None` if the device does not
/// count its memory.
fn kept(model: &Gemma4Model, device: &Device) -> Option<usize> {
    let in_use = || {
        device.sync().expect("the device synchronizes");
        device.memory_pool_usage().map(|usage| usage.bytes_in_use)
    };
    let tokens = TensorData::new(
        (0..POSITIONS as i32).map(|at| at % 128).collect(),
        [1, POSITIONS],
    );
    let tokens = Tensor::<2, Int>::from_data(tokens, &model.device());
    let before = in_use()?;
    let hidden = model
        .hidden(tokens, Logits::All)
        .expect("the tokens are in the vocabulary");
    let kept = in_use()?.checked_sub(before)?;
    // Burn keeps the autodiff graph until the backward has run. This backward frees the graph, so that the next measurement
    // does not count the graph.
    drop(hidden.sum().backward());
    Some(kept as usize)
}

#[test]
fn adapter_backward_keeps_mlp_activations_unless_recomputed() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for device in devices() {
        if device.name == "flex" {
            continue;
        }
        let model = model(&device.device.clone().autodiff());
        let numbers = LAYERS * POSITIONS * DType::F32.size();
        let inside = numbers * 2 * INSIDE;
        // Queries, keys and values are each kept twice: before and after their norms. The attention output is also kept
        // twice: once for the backward of attention, and once for the backward of the output projection.
        let heads = numbers * HEAD_DIM * (2 * HEADS + 2 * 2 + 2 * HEADS);
        // Each layer keeps six tensors of the hidden size. Two of them are the input of the layer, before and after the
        // norm. Two more are the input of the MLP, before and after the norm. The last two are the outputs of attention
        // and of the MLP.
        let streams = numbers * 6 * HIDDEN;
        let mut found = Vec::new();
        for anew in [false, true] {
            let model = model.clone().with_mlp_recompute(anew);
            // The first run is not measured, because the compiled kernels and initialized weights would count as kept
            // memory.
            let _ = kept(&model, &device.device);
            let Some(kept) = kept(&model, &device.device) else {
                continue;
            };
            let expected = heads + streams + if anew { 0 } else { inside };
            println!(
                "{}, recompute: {anew}: {kept} bytes, {expected} by the table",
                device.name
            );
            // The tolerance of an eighth covers smaller tensors. These tensors are the inputs of the LoRA matrices A and B,
            // the RoPE tables, the logsumexps and the final hidden states.
            assert!(kept <= expected + expected / 8, "{}: {kept}", device.name);
            found.push(kept);
        }
        if let [kept, anew] = found[..] {
            assert!(kept - anew >= inside, "{}: {kept} and {anew}", device.name);
        }
    }
}
