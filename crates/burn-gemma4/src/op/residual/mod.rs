//! Residual additions. The addition at the end of a block also computes the norm at the beginning of the next block.

#[cfg(feature = "cube")]
mod autodiff;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;

#[cfg(feature = "cube")]
use super::norm::NormBackend;
use super::norm::norm;
#[cfg(feature = "cube")]
use burn::backend::{
    Backend, Dispatch, ExtensionType, backend_extension, fusion::custom::TensorSpec,
    tensor::FloatTensor,
};
use burn::tensor::Tensor;

/// The inputs of a residual addition: the stream, and a block's output.
#[derive(Clone)]
pub(crate) struct ResidualAdd {
    /// The residual stream, `[rows, columns]`.
    pub stream: Tensor<2>,
    /// The block's output before its norm, `[rows, columns]`.
    pub added: Tensor<2>,
    /// The weight of the block's output norm, `[columns]`. No launch may write the norm weights, because the kernel may
    /// read them before the previous launch has ended.
    pub weight: Tensor<1>,
    /// The epsilon of both norms.
    pub epsilon: f64,
}

/// The operations between a residual addition and the next block: a multiplication by a scalar, and a norm.
#[derive(Clone)]
pub(crate) struct Next {
    /// A parameter, `[1]`, that multiplies the sum of the residual addition. `None` means 1.
    pub scalar: Option<Tensor<1>>,
    /// The weight of the next norm, `[columns]`.
    pub weight: Tensor<1>,
}

/// Computes `stream + norm(added)`, `[rows, columns]`.
pub(crate) fn residual(added: ResidualAdd) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if super::serve_with(&added.stream, &added.weight) {
        return Tensor::from_dispatch(Dispatch::residual(
            added.stream.into_dispatch(),
            added.added.into_dispatch(),
            added.weight.into_dispatch(),
            added.epsilon,
        ));
    }
    scaled(added, None)
}

/// Computes `(stream + norm(added)) · scalar` such that autodiff tracks the result.
fn scaled(added: ResidualAdd, scalar: Option<Tensor<1>>) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if runs(&added, scalar.as_ref()) {
        let scalar = match scalar {
            Some(scalar) => Scalar::Present(scalar.into_dispatch()),
            None => Scalar::Absent,
        };
        return Tensor::from_dispatch(Dispatch::add_normed(
            added.stream.into_dispatch(),
            added.added.into_dispatch(),
            added.weight.into_dispatch(),
            scalar,
            added.epsilon,
        ));
    }
    let stream = added.stream + norm(added.added, added.weight, added.epsilon);
    match scalar {
        Some(scalar) => stream * scalar.unsqueeze::<2>(),
        None => stream,
    }
}

/// True if [`AddNormedBackend::add_normed`] supports these tensors. All tensors must have the same dtype, and autodiff
/// must not track the scalar.
#[cfg(feature = "cube")]
fn runs(added: &ResidualAdd, scalar: Option<&Tensor<1>>) -> bool {
    let dtype = added.stream.dtype();
    super::runs(&added.stream.device(), dtype)
        && added.weight.dtype() == dtype
        && scalar.is_none_or(|scalar| scalar.dtype() == dtype && !scalar.is_tracked())
}

/// Computes `stream' = (stream + norm(added)) · scalar`. Also computes `norm(stream')` if the kernels support all
/// inputs.
pub(crate) fn residual_before(added: ResidualAdd, next: Next) -> (Tensor<2>, Option<Tensor<2>>) {
    let Next {
        scalar,
        weight: next_weight,
    } = next;
    #[cfg(feature = "cube")]
    if [Some(&added.weight), scalar.as_ref(), Some(&next_weight)]
        .into_iter()
        .flatten()
        .all(|weight| super::serve_with(&added.stream, weight))
    {
        let (stream, normed) = residual_and_norm(added, scalar, next_weight);
        return (stream, Some(normed));
    }
    let _ = next_weight;
    (scaled(added, scalar), None)
}

/// Computes [`residual_before`] in one launch.
#[cfg(feature = "cube")]
fn residual_and_norm(
    added: ResidualAdd,
    scalar: Option<Tensor<1>>,
    next_weight: Tensor<1>,
) -> (Tensor<2>, Tensor<2>) {
    let [stream, of_block, weight] = [
        added.stream.into_dispatch(),
        added.added.into_dispatch(),
        added.weight.into_dispatch(),
    ];
    let next = next_weight.into_dispatch();
    let result: Residual<Dispatch> = match scalar {
        Some(scalar) => Dispatch::residual_scale_norm(
            stream,
            of_block,
            weight,
            scalar.into_dispatch(),
            next,
            added.epsilon,
        ),
        None => Dispatch::residual_norm(stream, of_block, weight, next, added.epsilon),
    };
    (
        Tensor::from_dispatch(result.stream),
        Tensor::from_dispatch(result.normed),
    )
}

/// The new residual stream, and its norm.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Residual<B: Backend> {
    pub stream: FloatTensor<B>,
    pub normed: FloatTensor<B>,
}

/// The optional scalar that multiplies the sum of the stream and the normalized output of the block.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub enum Scalar<B: Backend> {
    Absent,
    /// The scalar, `[1]`.
    Present(FloatTensor<B>),
}

/// The residual addition as an operator of a backend, forward and backward.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait AddNormedBackend: NormBackend {
    /// Computes `(stream + norm(added)) · scalar`.
    #[fusion(meta = |stream, _added, _weight, _scalar, _epsilon| stream.clone())]
    fn add_normed(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] scalar: Scalar<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

/// Returns the shapes and dtypes of the results, which Burn's fusion needs before it runs the operator.
#[cfg(feature = "cube")]
fn metadata(stream: &TensorSpec) -> ResidualMetadata {
    ResidualMetadata {
        stream: stream.clone(),
        normed: stream.clone(),
    }
}

/// The residual kernel as operators of a backend. Each operator is documented at the function of this module that calls
/// the operator.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub trait ResidualBackend: Backend {
    #[fusion(meta = |stream, _added, _weight, _epsilon| stream.clone())]
    fn residual(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |stream, _added, _weight, _next, _epsilon| metadata(stream))]
    fn residual_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self>;

    #[fusion(meta = |stream, _added, _weight, _scalar, _next, _epsilon| metadata(stream))]
    fn residual_scale_norm(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        scalar: FloatTensor<Self>,
        next_weight: FloatTensor<Self>,
        epsilon: f64,
    ) -> Residual<Self>;
}
