//! Tests of multi-head attention with a cache of keys and values, as in autoregressive inference.

use super::*;
use crate::devices::{TestDevice, devices};
use attention_cube::nn::{self, MhaCache, MhaInput};
use burn::nn::attention as burn_nn;

/// The length of the whole sequence in each call. The first call has three tokens, and each further call adds one
/// token.
const STEPS: std::ops::RangeInclusive<usize> = 3..=6;

struct Modules {
    unfused: burn_nn::MultiHeadAttention,
    fused: nn::MultiHeadAttention,
    tokens: Tensor<3>,
    memory: Tensor<3>,
}

fn modules(device: &TestDevice) -> Modules {
    let unfused = unfused(&config(false), &device.device, DType::F32);
    let [tokens, memory] = sequences::<2>(&device.device, DType::F32);
    Modules {
        fused: unfused.clone().into(),
        unfused,
        tokens,
        memory,
    }
}

fn first(tokens: &Tensor<3>, length: usize) -> Tensor<3> {
    tokens.clone().narrow(1, 0, length)
}

#[test]
fn mha_cache_with_causal_mask_equals_whole_forward() {
    for device in devices() {
        let Modules { fused, tokens, .. } = modules(&device);
        let mut cache = MhaCache::autoregressive();
        for length in STEPS {
            let input = MhaInput::self_attn(first(&tokens, length)).causal();
            let found = fused.forward_cache(input.clone(), &mut cache);
            let whole = fused.forward(input);
            let case = format!("{}, {length} tokens", device.name);
            assert_near(&case, &plain(found), &plain(whole));
        }
    }
}

/// Checks masks whose size grows with the length of the sequence. The test also has a case without masks. In both
/// cases, the first call has no causal mask, so its tokens may see each other.
#[test]
fn mha_cache_with_masks_equals_burn_nn() {
    for device in devices() {
        let Modules {
            fused,
            unfused,
            tokens,
            ..
        } = modules(&device);
        let on = &device.device;
        for masked in [false, true] {
            let mut cache = MhaCache::autoregressive();
            let mut cache_of_burn_nn = burn_nn::MhaCache::autoregressive();
            for length in STEPS {
                let mut input = MhaInput::self_attn(first(&tokens, length));
                let mut input_of_burn_nn = burn_nn::MhaInput::self_attn(first(&tokens, length));
                if masked {
                    // The slice takes the last keys of the padding mask, so that some keys of the second sequence are hidden.
                    let pad = pad_mask(on).narrow(1, LENGTH - length - 2, length);
                    let attn = attention_mask(on).narrow(1, 0, length).narrow(2, 0, length);
                    input = input.mask_pad(pad.clone()).mask_attn(attn.clone());
                    input_of_burn_nn = input_of_burn_nn.mask_pad(pad).mask_attn(attn);
                }
                let found = fused.forward_cache(input, &mut cache);
                let expected = unfused.forward_cache(input_of_burn_nn, &mut cache_of_burn_nn);
                let case = format!("{}, {length} tokens, masked {masked}", device.name);
                assert_near(&case, &plain(found), &plain(expected.context));
            }
        }
    }
}

/// Checks that later calls of cross-attention use the keys and values that the first call has cached.
#[test]
fn mha_cache_of_cross_attention_equals_burn_nn() {
    for device in devices() {
        let Modules {
            fused,
            unfused,
            tokens,
            memory,
        } = modules(&device);
        let mut cache = MhaCache::autoregressive_cross_attention();
        let mut cache_of_burn_nn = burn_nn::MhaCache::autoregressive_cross_attention();
        for length in STEPS {
            let memory = match length == *STEPS.start() {
                true => memory.clone(),
                false => memory.zeros_like(),
            };
            let (query, pad) = (first(&tokens, length), pad_mask(&device.device));
            let input = MhaInput::new(query.clone(), memory.clone(), memory.clone());
            let found = fused.forward_cache(input.mask_pad(pad.clone()), &mut cache);
            let input = burn_nn::MhaInput::new(query, memory.clone(), memory);
            let expected = unfused.forward_cache(input.mask_pad(pad), &mut cache_of_burn_nn);
            let case = format!("{}, {length} tokens", device.name);
            assert_near(&case, &plain(found), &plain(expected.context));
        }
    }
}

#[test]
#[should_panic(expected = "expected `4`, one more than the cache")]
fn mha_cache_that_skips_a_token_panics() {
    let device = Device::flex();
    let mha = nn::MultiHeadAttention::new(&config(false), &device);
    let [tokens] = sequences::<1>(&device, DType::F32);
    let mut cache = MhaCache::autoregressive();
    for length in [3, 5] {
        let input = MhaInput::self_attn(first(&tokens, length));
        let _ = mha.forward_cache(input, &mut cache);
    }
}
