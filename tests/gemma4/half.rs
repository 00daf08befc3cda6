//! Half precision: no further from f32 than transformers is in the same dtype.

use crate::{
    devices::devices,
    fixture::{Fixture, tokens, values},
};
use burn::tensor::DType;

/// The root of the mean square of `a - b`.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let squares: f32 = a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum();
    (squares / a.len() as f32).sqrt()
}

/// Two correct orders of summation differ by what bf16 itself rounds, so the yardstick is the distance of transformers'
/// bf16 from f32; f16 has three bits more and must do better than bf16.
#[test]
fn logits_are_as_close_to_f32_as_those_of_transformers() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            if !device.device.supports_dtype(dtype) || !device.supports(dtype) {
                println!("{} does not compute in {}", device.name, dtype.name());
                continue;
            }
            for fixture in Fixture::all() {
                let gemma = fixture.load(&device.device, dtype);
                assert_eq!(gemma.dtype(), dtype);
                let input = tokens(&[&fixture.prompt], &device.device);
                let found = values(gemma.model().forward(input));
                let exact = &fixture.reference("logits").values;
                let theirs = distance(&fixture.reference("bf16.logits").values, exact);
                let ours = distance(&found, exact);
                let allowed = match dtype {
                    DType::F16 => theirs,
                    _ => 1.5 * theirs,
                };
                println!(
                    "{} {} {}: {ours} from f32, transformers in bf16 {theirs}",
                    fixture.name,
                    device.name,
                    dtype.name()
                );
                assert!(
                    ours <= allowed,
                    "{} {}: {ours} > {allowed}",
                    fixture.name,
                    device.name
                );
            }
        }
    }
}
