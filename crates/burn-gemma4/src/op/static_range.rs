//! Rounds activations by a static scale, which checkpoints with `quant_method` "gemma" bring. Hugging Face Transformers
//! calls this static range quantization (SRQ).

use burn::tensor::{DType, Tensor, bf16, f16};

/// Rounds each element to the nearest of the 256 numbers `code · scale`, with codes from -128 to 127 and ties to even.
/// A scale that is 0 in the tensor's dtype rounds nothing.
///
/// The scale, the quotient and the result are in the tensor's dtype, as in `apply_srq` of Hugging Face Transformers.
pub(crate) fn round_by_scale(input: Tensor<2>, scale: f32) -> Tensor<2> {
    let scale = match input.dtype() {
        DType::F16 => f16::from_f32(scale).to_f32(),
        DType::BF16 => bf16::from_f32(scale).to_f32(),
        _ => scale,
    };
    match scale {
        0.0 => input,
        scale => (input / scale).round().clamp(-128, 127) * scale,
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;

    #[test]
    fn round_by_scale_rounds_ties_to_even_and_clips() {
        let numbers = [
            0.25f32,
            0.75,
            -0.25,
            -0.75,
            1.24,
            63.4,
            63.5,
            64.0,
            1e9,
            -64.0,
            -64.3,
            f32::NAN,
        ];
        let input = Tensor::<1>::from_data(numbers, &Device::flex()).unsqueeze();
        let found: Vec<f32> = round_by_scale(input.clone(), 0.5)
            .into_data()
            .iter()
            .collect();
        let expected = [
            0.0, 1.0, 0.0, -1.0, 1.0, 63.5, 63.5, 63.5, 63.5, -64.0, -64.0,
        ];
        assert_eq!(found[..11], expected);
        assert!(found[11].is_nan());
        // The smallest scales are 0 in f16.
        let half = input.cast(DType::F16);
        let found = round_by_scale(half.clone(), 1e-9).into_data();
        assert_eq!(found.as_bytes(), half.into_data().as_bytes());
    }
}
