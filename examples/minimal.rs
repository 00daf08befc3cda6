//! Calls fused attention in the simplest way: causal, with four query heads per key head.

use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{Device, Distribution, Tensor};

fn main() {
    // The device is the CPU. For a GPU, use `Device::wgpu(Default::default())` or `Device::cuda(0)`.
    let device = Device::flex();
    let random = |heads| Tensor::<4>::random([1, heads, 128, 64], Distribution::Default, &device);
    let (query, key, value) = (random(8), random(2), random(2));

    let output = fused_attention(query, key, value.clone(), AttentionOptions::new().causal());

    println!(
        "output [batch, heads, queries, columns]: {:?}",
        output.dims()
    );
    // With a causal mask, the first query sees only the first key. So the first output row of head 0 is the first value row
    // of head 0.
    let first = |tensor: Tensor<4>| tensor.slice([0..1, 0..1, 0..1, 0..4]).into_data();
    println!("first output: {}", first(output));
    println!("first value:  {}", first(value));
}
