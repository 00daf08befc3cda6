//! Tests how much memory attention takes on the CPU.

use super::ONE_AT_A_TIME;
use super::counted::peak_of;
use attention_cube::{AttentionOptions, fused_attention};
use burn::tensor::{Device, Distribution, Tensor};
use std::sync::PoisonError;

const HEAD_DIM: usize = 16;

/// Returns the maximum number of bytes that a forward and its backward hold beyond the inputs.
fn peak(len: usize) -> usize {
    let device = Device::flex().autodiff();
    let random = || {
        let shape = [1, 1, len, HEAD_DIM];
        Tensor::<4>::random(shape, Distribution::Default, &device).require_grad()
    };
    let (query, key, value) = (random(), random(), random());
    peak_of(|| {
        let options = AttentionOptions::new().causal();
        let output = fused_attention(query, key, value, options);
        drop(output.sum().backward());
    })
}

/// Attention over 8,192 tokens must take less than 32 MiB. A tensor of all scores would take 256 MiB.
#[test]
fn attention_on_the_processor_keeps_no_tensor_of_all_scores() {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let [half, whole] = [4096, 8192].map(peak);
    assert!(whole < 32 << 20, "{whole} bytes");
    assert!(
        whole < 2 * half,
        "{half} bytes, {whole} bytes of twice the length"
    );
}
