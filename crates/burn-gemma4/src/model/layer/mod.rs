//! The parts of a layer.

pub mod attention;
pub mod decoder;
pub mod embedding;
pub mod experts;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod rope;

#[cfg(feature = "cube")]
mod norm_step;

#[cfg(any(feature = "cuda", all(test, feature = "flex")))]
mod product;

pub use attention::Attention;
pub use decoder::DecoderLayer;
pub use embedding::Embedding;
pub use experts::{Experts, Router};
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::RmsNorm;

use burn::{
    module::{Initializer, Param},
    tensor::{DType, Device, Tensor},
};

/// Weights from a normal distribution, drawn when they are first read: a checkpoint replaces them before.
fn random<const D: usize>(shape: [usize; D], deviation: f64, device: &Device) -> Param<Tensor<D>> {
    Initializer::Normal {
        mean: 0.0,
        std: deviation,
    }
    .init(shape, device)
}

fn constant<const D: usize>(value: f64, shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    Initializer::Constant { value }.init(shape, device)
}

/// All dimensions but the last as one.
pub(crate) fn flat_rows<const D: usize>(tensor: Tensor<D>) -> Tensor<2> {
    let shape = tensor.dims();
    let columns = shape[D - 1];
    tensor.reshape([shape.iter().product::<usize>() / columns, columns])
}

/// GELU by its approximation through tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415), in f32, rounded once.
///
/// Burn's own raises to the power of 3.0 in the input's dtype, which rounds bf16 several times.
fn gelu<const D: usize>(input: Tensor<D>) -> Tensor<D> {
    const SQRT_2_OVER_PI: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
    let dtype = input.dtype();
    let x = input.cast(DType::F32);
    let cubed = x.clone() * x.clone() * x.clone();
    let inner = (x.clone() + cubed * 0.044715) * SQRT_2_OVER_PI;
    (x * (inner.tanh() + 1.0) * 0.5).cast(dtype)
}
