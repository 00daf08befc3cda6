//! Adapters by kernels: what the backward keeps of dense networks, or multiplies anew, changes no gradient.

use crate::{
    devices::devices,
    fixture,
    gradients::{relative, tracked},
    qlora::{adapted, learned},
};
use burn::tensor::{DType, Device};
use burn_gemma4::{Gemma4Model, LoadOptions, Quantization};

/// How far f32 may be on another device: of the smallest gradients, those of queries, softmax leaves a few digits.
const TOLERANCE: f64 = 3e-4;

/// Those of Burn's own operators on the processor, one by one, but for a rounding; what is made anew is what was kept.
#[test]
fn gradients_are_the_same_whatever_is_kept() {
    for form in [Quantization::Stored, Quantization::Q4] {
        let load = |device: &Device| {
            let options = LoadOptions::new().dtype(DType::F32).quantization(form);
            let model = Gemma4Model::load(fixture::folder("dense-ple"), device, options);
            adapted(model.expect("a model"))
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
                let (_, anew) = learned(&model.with_mlp_anew(true), &tracked, false);
                assert!(anew.keys().eq(kept.keys()), "{what}");
                for (path, anew) in anew {
                    let error = relative(&anew, &kept[&path]);
                    assert!(error <= 1e-6, "{what}, anew: {path} is off by {error:e}");
                }
            }
        }
    }
}
