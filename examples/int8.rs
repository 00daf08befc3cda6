//! Computes attention over an int8 KV cache, which takes half of the memory of bf16 and causes a small error.
//!
//! ```text
//! cargo run --release --example int8
//! ```

use attention_cube::{
    AttentionOptions, fused_attention,
    quantized::{QuantizedRows, quantized_attention},
};
use burn::tensor::{Device, Distribution, Tensor};

fn main() {
    let device = Device::flex();
    let random = |heads, length| {
        let normal = Distribution::Normal(0.0, 1.0);
        Tensor::<4>::random([1, heads, length, 128], normal, &device)
    };
    // The query has one token and eight heads. The query attends to a KV cache of 1024 tokens with two heads.
    let (query, key, value) = (random(8, 1), random(2, 1024), random(2, 1024));
    let options = || AttentionOptions::new().causal();

    // The example quantizes the whole cache at once. A real KV cache quantizes each token once, when the token is written.
    let int8_key = QuantizedRows::new(key.clone());
    let int8_value = QuantizedRows::new(value.clone());
    let bf16_bytes = 2 * (key.shape().num_elements() + value.shape().num_elements());
    let int8_bytes = int8_key.bytes() + int8_value.bytes();
    println!("bytes in bf16: {bf16_bytes}, in int8 with scales: {int8_bytes}");

    let exact = fused_attention(query.clone(), key, value, options());
    let output = quantized_attention(query, int8_key, int8_value, options());
    let norm = |tensor: Tensor<4>| tensor.square().sum().sqrt().into_scalar::<f32>();
    let error = norm(output - exact.clone()) / norm(exact);
    println!("relative error of the output: {:.2} %", 100.0 * error);
}
