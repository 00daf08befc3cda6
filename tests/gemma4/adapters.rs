//! Tests the gradients of LoRA adapters on devices that run CubeCL kernels. Stored and recomputed activations of the MLP
//! must give the same gradients.

use crate::{
    devices::devices,
    fixture,
    gradients::{relative, tracked},
    qlora::{adapted, learned},
};
use burn::tensor::{DType, Device};
use burn_gemma4::{Gemma4Model, LoadOptions, Quantization};

/// The maximum difference between a device's f32 gradient and the CPU's gradient, relative to the norm of the CPU's
/// gradient. The gradients of the query matrices determine this tolerance. They are the smallest gradients and have
/// only a few exact digits.
const TOLERANCE: f64 = 3e-4;

/// A device's gradients equal the gradients of Burn's own operators on the CPU, except for rounding. Recomputed activations
/// give the same gradients as stored activations.
#[test]
fn adapter_gradients_with_mlp_recompute_equal_those_with_kept_activations() {
    for form in [Quantization::Stored, Quantization::Q4] {
        let load = |device: &Device| {
            let options = LoadOptions::new().dtype(DType::F32).quantization(form);
            let model = Gemma4Model::load(fixture::folder("dense-ple"), device, options);
            adapted(model.expect("the model is valid"))
        };
        let flex = Device::flex().autodiff();
        let (expected_loss, expected) = learned(&load(&flex), &flex, false);
        for device in devices() {
            if device.name == "flex" {
                continue;
            }
            for (strategy, tracked) in tracked(&device) {
                let what = format!("{form:?} on {strategy}");
                let model = load(&tracked);
                let (loss, kept) = learned(&model, &tracked, false);
                let error = (loss - expected_loss).abs();
                assert!(error <= 1e-5 * expected_loss, "{what}: {loss}");
                assert!(kept.keys().eq(expected.keys()), "{what}");
                for (path, kept) in &kept {
                    let error = relative(kept, &expected[path]);
                    assert!(error <= TOLERANCE, "{what}: {path} is off by {error:e}");
                }
                let (_, anew) = learned(&model.with_mlp_recompute(true), &tracked, false);
                assert!(anew.keys().eq(kept.keys()), "{what}");
                for (path, anew) in anew {
                    let error = relative(&anew, &kept[&path]);
                    assert!(
                        error <= 1e-6,
                        "{what}, recomputed: {path} is off by {error:e}"
                    );
                }
            }
        }
    }
}
