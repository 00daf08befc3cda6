//! The end of a block and the beginning of the next: sums of the residual stream and their norms.

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

/// What a block adds to the residual stream.
#[derive(Clone)]
pub(crate) struct Added {
    /// `[rows, columns]`.
    pub stream: Tensor<2>,
    /// `[rows, columns]`, before its norm.
    pub added: Tensor<2>,
    /// `[columns]`, of that norm: a parameter, as the next norm's is, which no launch writes.
    pub weight: Tensor<1>,
    /// Of all norms.
    pub epsilon: f64,
}

/// What becomes of the sum before the next block.
#[derive(Clone)]
pub(crate) struct Next {
    /// `[1]`, a parameter: what it is multiplied by; 1 where there is none.
    pub scalar: Option<Tensor<1>>,
    /// `[columns]`, of the next norm.
    pub weight: Tensor<1>,
}

/// `stream + norm(added)`.
pub(crate) fn residual(added: Added) -> Tensor<2> {
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

/// `(stream + norm(added)) · scalar`, with gradients.
fn scaled(added: Added, scalar: Option<Tensor<1>>) -> Tensor<2> {
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

/// Whether the kernel that has gradients serves: it reads all in one dtype, and the scalar is not trained.
#[cfg(feature = "cube")]
fn runs(added: &Added, scalar: Option<&Tensor<1>>) -> bool {
    let dtype = added.stream.dtype();
    super::runs(&added.stream.device(), dtype)
        && added.weight.dtype() == dtype
        && scalar.is_none_or(|scalar| scalar.dtype() == dtype && !scalar.is_tracked())
}

/// `stream' = (stream + norm(added)) · scalar` and, where kernels serve them all, `norm(stream')`.
pub(crate) fn residual_before(added: Added, next: Next) -> (Tensor<2>, Option<Tensor<2>>) {
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

/// [`residual_before`] in one launch.
#[cfg(feature = "cube")]
fn residual_and_norm(
    added: Added,
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

/// The residual stream, and its norm.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Residual<B: Backend> {
    pub stream: FloatTensor<B>,
    pub normed: FloatTensor<B>,
}

/// The factor of the stream, where it has one.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub enum Scalar<B: Backend> {
    Absent,
    /// `[1]`.
    Present(FloatTensor<B>),
}

/// The stream's sum as an operator of a backend with gradients.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Autodiff, Fusion)]
pub trait AddNormedBackend: NormBackend {
    /// `(stream + norm(added)) · scalar`.
    #[fusion(meta = |stream, _added, _weight, _scalar, _epsilon| stream.clone())]
    fn add_normed(
        stream: FloatTensor<Self>,
        added: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] scalar: Scalar<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self>;
}

/// What Burn's fusion must know of the results before they exist.
#[cfg(feature = "cube")]
fn metadata(stream: &TensorSpec) -> ResidualMetadata {
    ResidualMetadata {
        stream: stream.clone(),
        normed: stream.clone(),
    }
}

/// The kernel as operators of a backend. The functions above say what they compute.
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
