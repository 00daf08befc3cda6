//! Tests of the transformer encoder: training, inference with a cache, and records.

use super::*;
use crate::devices::devices;
use attention_cube::nn::{FusedTransformerEncoder, TransformerEncoderInput};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer as burn_nn;
use burn::optim::{GradientsParams, SgdConfig};
use burn::store::ModuleRecord;

const STEPS: usize = 50;
const LEARNING_RATE: f64 = 0.2;

fn encoder_config(norm_first: bool) -> burn_nn::TransformerEncoderConfig {
    burn_nn::TransformerEncoderConfig::new(D_MODEL, 2 * D_MODEL, HEADS, 2)
        .with_dropout(0.0)
        .with_norm_first(norm_first)
}

fn unfused_encoder(norm_first: bool, device: &Device, dtype: DType) -> burn_nn::TransformerEncoder {
    randomized(encoder_config(norm_first).init(device), device, dtype)
}

/// Trains `module` by stochastic gradient descent, and returns the loss of each step.
fn train<M: Module>(
    mut module: M,
    device: &Device,
    dtype: DType,
    forward: impl Fn(&M, Tensor<3>) -> Tensor<3>,
) -> Vec<f64> {
    let [input, target] = sequences::<2>(device, dtype);
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = (forward(&module, input.clone()) - target.clone())
            .square()
            .mean();
        losses.extend(plain(loss.clone()));
        let gradients = GradientsParams::from_grads(loss.backward(), &module);
        module = optimizer.step(LEARNING_RATE, module, gradients);
    }
    losses
}

fn losses_of_burn_nn(device: &Device, dtype: DType) -> Vec<f64> {
    let encoder = unfused_encoder(false, device, dtype);
    train(encoder, device, dtype, |encoder, x| {
        let input = burn_nn::TransformerEncoderInput::new(x)
            .mask_pad(pad_mask(device))
            .mask_attn(generate_autoregressive_mask(BATCH, LENGTH, device));
        encoder.forward(input)
    })
}

#[test]
fn encoder_in_training_has_the_losses_of_burn_nn() {
    let exact = losses_of_burn_nn(&Device::flex().autodiff(), DType::F64);
    assert!(exact[STEPS - 1] < exact[0], "{exact:?}");
    for device in devices() {
        let on = &device.device.clone().autodiff();
        let baseline = losses_of_burn_nn(on, DType::F32);
        let fused = FusedTransformerEncoder::from(unfused_encoder(false, on, DType::F32));
        let found = train(fused, on, DType::F32, |encoder, x| {
            let input = TransformerEncoderInput::new(x).mask_pad(pad_mask(on));
            encoder.forward(input.causal())
        });
        let largest = |losses: &[f64]| {
            let errors = losses.iter().zip(&exact).map(|(a, b)| (a - b).abs());
            errors.fold(0.0, f64::max)
        };
        let allowed = 2.0 * largest(&baseline) + 1e-6 * exact[0];
        let error = largest(&found);
        assert!(error <= allowed, "{}: {error:e} > {allowed:e}", device.name);
    }
}

#[test]
fn encoder_with_cache_equals_burn_nn() {
    for device in devices() {
        for norm_first in [false, true] {
            let on = &device.device;
            let unfused = unfused_encoder(norm_first, on, DType::F32);
            let fused = FusedTransformerEncoder::from(unfused.clone());
            let [tokens] = sequences::<1>(on, DType::F32);
            let mut cache = fused.new_autoregressive_cache();
            let mut cache_of_burn_nn = unfused.new_autoregressive_cache();
            for length in 3..=6 {
                let tokens = tokens.clone().narrow(1, 0, length);
                let input = TransformerEncoderInput::new(tokens.clone()).causal();
                let found = fused.forward_autoregressive_inference(input.clone(), &mut cache);
                let mask = generate_autoregressive_mask(BATCH, length, on);
                let input_of_burn_nn =
                    burn_nn::TransformerEncoderInput::new(tokens).mask_attn(mask);
                let expected = unfused
                    .forward_autoregressive_inference(input_of_burn_nn, &mut cache_of_burn_nn);
                let case = format!("{}, {length} tokens, norm first {norm_first}", device.name);
                assert_near(&case, &plain(found.clone()), &plain(expected));
                let whole = fused.forward(input);
                assert_near(&case, &plain(found), &plain(whole));
            }
        }
    }
}

#[test]
fn encoder_record_of_burn_nn_loads() {
    for device in devices() {
        let on = &device.device;
        let unfused = unfused_encoder(true, on, DType::F32);
        let [x] = sequences::<1>(on, DType::F32);
        let input = burn_nn::TransformerEncoderInput::new(x.clone());
        let expected = plain(unfused.forward(input));

        let bytes = unfused.into_record().into_bytes();
        let bytes = bytes.expect("the record has bytes");
        let record = ModuleRecord::from_bytes(bytes).expect("the bytes are a record");
        let fused = FusedTransformerEncoder::new(&encoder_config(true), on)
            .try_load_record(record)
            .expect("the record fits");
        let output = fused.forward(TransformerEncoderInput::new(x.clone()));
        assert_near(device.name, &plain(output), &expected);

        let unfused = burn_nn::TransformerEncoder::from(fused);
        let output = unfused.forward(burn_nn::TransformerEncoderInput::new(x));
        assert_near(device.name, &plain(output), &expected);
    }
}
