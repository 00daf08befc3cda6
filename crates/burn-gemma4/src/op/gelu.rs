//! GELU, the activation of every gate.

use burn::tensor::{DType, Tensor};

/// GELU by its approximation through tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415), in f32, rounded once.
///
/// Burn's own raises to the power of 3.0 in the input's dtype, which rounds bf16 several times.
pub(crate) fn gelu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    let dtype = input.dtype();
    let x = input.cast(DType::F32);
    let cubed = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cubed * 0.044715) * SQRT_2_OVER_PI;
    (x * (inner.tanh() + 1.0) * 0.5).cast(dtype)
}
