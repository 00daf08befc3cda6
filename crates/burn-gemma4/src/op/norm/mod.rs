//! RMS normalization of rows (Zhang and Sennrich 2019, arXiv:1910.07467), in f32.
//!
//! On CubeCL devices the norm and its backward are one operator each. With Burn's own operators, a training step would
//! read and write the rows about twenty times.

#[cfg(feature = "cube")]
mod autodiff;
#[cfg(feature = "cube")]
mod gradient;
#[cfg(feature = "cube")]
pub(super) mod kernel;
#[cfg(feature = "cube")]
mod launch;

#[cfg(feature = "cube")]
use super::{flat_rows, with_shape};
use burn::tensor::{DType, Tensor};
#[cfg(feature = "cube")]
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension, fusion::custom::TensorSpec,
        tensor::FloatTensor,
    },
    tensor::Shape,
};

/// Computes `x / √(mean(x²) + ε) · weight` over the last dimension. `weight` is `[columns]`, of any dtype.
pub(crate) fn norm<const D: usize>(input: Tensor<D>, weight: Tensor<1>, epsilon: f64) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if super::runs(&input.device(), input.dtype()) {
        let shape = input.dims();
        let rows = Dispatch::norm(
            flat_rows(input).into_dispatch(),
            weight.into_dispatch(),
            epsilon,
        );
        return with_shape(Tensor::<2>::from_dispatch(rows), shape);
    }
    let dtype = input.dtype();
    let weight = weight.cast(DType::F32).unsqueeze::<D>();
    (normalize_f32(input, epsilon) * weight).cast(dtype)
}

/// Computes `x / √(mean(x²) + ε)` over the last dimension: the RMS norm without a weight.
pub(crate) fn normalize<const D: usize>(input: Tensor<D>, epsilon: f64) -> Tensor<D> {
    #[cfg(feature = "cube")]
    if super::serve(&input) {
        let shape = input.dims();
        let rows = Dispatch::normalize(flat_rows(input).into_dispatch(), epsilon);
        return with_shape(Tensor::<2>::from_dispatch(rows), shape);
    }
    // Use the kernel with a weight of ones, because the kernel without a weight has no backward.
    #[cfg(feature = "cube")]
    if super::runs(&input.device(), input.dtype()) {
        let device = input.device().without_autodiff();
        let ones = Tensor::ones([input.dims()[D - 1]], (&device, DType::F32));
        return norm(input, ones, epsilon);
    }
    let dtype = input.dtype();
    normalize_f32(input, epsilon).cast(dtype)
}

fn normalize_f32<const D: usize>(input: Tensor<D>, epsilon: f64) -> Tensor<D> {
    let input = input.cast(DType::F32);
    let mean = input.clone().square().mean_dim(D - 1);
    input / (mean + epsilon).sqrt()
}

/// The gradients of the RMS norm: the input's gradient, and partial sums of the weight's gradient, `[parts, columns]`
/// in f32.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct NormGradients<B: Backend> {
    pub input: FloatTensor<B>,
    pub weight: FloatTensor<B>,
}

/// The number of partial sums of a weight's gradient. One cube computes one partial sum, and 256 cubes keep any device
/// busy.
#[cfg(feature = "cube")]
const PARTS: usize = 256;

/// The norm with a weight as an operator of a backend, forward and backward.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait NormBackend: Backend {
    /// Computes `x / √(mean(x²) + ε) · weight` of each row of `[rows, columns]`. `weight` is `[columns]`, of any dtype.
    #[fusion(meta = |input, _weight, _epsilon| input.clone())]
    fn norm(input: FloatTensor<Self>, weight: FloatTensor<Self>, epsilon: f64)
    -> FloatTensor<Self>;

    /// Returns the gradients of [`norm`](Self::norm), from the gradient of its output.
    #[fusion(meta = |input, _weight, _gradient, _epsilon| metadata(input))]
    fn norm_gradients(
        input: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        gradient: FloatTensor<Self>,
        epsilon: f64,
    ) -> NormGradients<Self>;
}

/// The norm without a weight as an operator of a backend.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub trait NormalizeBackend: Backend {
    /// See [`normalize`].
    #[fusion(meta = |input, _epsilon| input.clone())]
    fn normalize(input: FloatTensor<Self>, epsilon: f64) -> FloatTensor<Self>;
}

/// Returns the shapes and dtypes of the gradients, which Burn's fusion needs before it runs the operator.
#[cfg(feature = "cube")]
fn metadata(input: &TensorSpec) -> NormGradientsMetadata {
    let shape = [PARTS.min(input.shape[0]), input.shape[1]];
    NormGradientsMetadata {
        input: input.clone(),
        weight: TensorSpec::new(Shape::new(shape), DType::F32),
    }
}
