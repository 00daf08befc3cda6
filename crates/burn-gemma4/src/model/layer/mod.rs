//! The modules of a decoder layer.

pub mod attention;
pub mod decoder;
pub mod embedding;
pub mod experts;
pub mod linear;
pub mod mlp;
pub mod norm;
pub(crate) mod ops;
pub mod weight;

pub use attention::Attention;
pub use decoder::DecoderLayer;
pub use embedding::Embedding;
pub use experts::{Experts, Router};
pub(crate) use linear::ActivationScales;
pub use linear::Linear;
pub use mlp::Mlp;
pub use norm::RmsNorm;
pub use weight::{QuantizedWeight, Weight};

use burn::{
    module::{Initializer, Param},
    tensor::{Device, Tensor},
};

/// Creates normally distributed weights. The values are drawn when the weights are first read, so loading a checkpoint draws
/// no values.
pub(in crate::model) fn random<const D: usize>(
    shape: [usize; D],
    deviation: f64,
    device: &Device,
) -> Param<Tensor<D>> {
    Initializer::Normal {
        mean: 0.0,
        std: deviation,
    }
    .init(shape, device)
}

/// Creates weights that all have the same value.
pub(in crate::model) fn constant<const D: usize>(
    value: f64,
    shape: [usize; D],
    device: &Device,
) -> Param<Tensor<D>> {
    Initializer::Constant { value }.init(shape, device)
}
