//! Products with matrices that have low-rank adapters, each as one operator with its gradients: as Burn's own operators it would be nine
//! a matrix, and twice as many in the backward, of which an adapter of a small model is made of thousands a step.

mod autodiff;
#[cfg(feature = "cube")]
mod casts;
mod factors;

pub(in crate::op) use autodiff::SavedMatrix;

use super::Matrix;
use crate::quantized::layout::Layout;
#[cfg(feature = "cube")]
use burn::{backend::fusion::custom::TensorSpec, tensor::Shape};
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    module::LoraAdapter,
    tensor::Tensor,
};

/// `input · baseᵀ + input · readsᵀ · writesᵀ · scale`, of rows `[rows, columns in]`. The factors, which may be in f32, are multiplied in
/// the input's dtype: their product, of the matrix's size, is never there, nor is its gradient.
pub(crate) fn adapted(input: Tensor<2>, base: Matrix, adapter: &LoraAdapter) -> Tensor<2> {
    let (matrix, options) = parts(base, adapter);
    let rows = Dispatch::adapted(input.into_dispatch(), matrix, options);
    Tensor::from_dispatch(rows.output)
}

/// A matrix with its adapter as operators take it.
pub(in crate::op) fn parts(
    base: Matrix,
    adapter: &LoraAdapter,
) -> (AdaptedMatrix<Dispatch>, AdaptedOptions) {
    let scale = adapter.scale;
    let (base, layout) = match base {
        Matrix::Whole(matrix) => (Base::Whole(matrix.into_dispatch()), None),
        Matrix::Quantized(matrix) => {
            let words = matrix.words.without_autodiff();
            (Base::Quantized(words.into_dispatch()), Some(matrix.layout))
        }
    };
    let matrix = AdaptedMatrix {
        base,
        reads: adapter.b.val().into_dispatch(),
        writes: adapter.a.val().into_dispatch(),
    };
    (matrix, AdaptedOptions { scale, layout })
}

/// What is beneath an adapter, `[columns out, columns in]`.
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub enum Base<B: Backend> {
    Whole(FloatTensor<B>),
    /// The words of its rows.
    Quantized(IntTensor<B>),
}

/// A matrix with an adapter, whose factors are `[rank, columns in]` and `[columns out, rank]`.
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub struct AdaptedMatrix<B: Backend> {
    #[extension_type]
    pub base: Base<B>,
    pub reads: FloatTensor<B>,
    pub writes: FloatTensor<B>,
}

/// What is known of such a matrix on the host.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedOptions {
    /// What the factors' product counts.
    pub scale: f64,
    /// Of quantized rows.
    pub layout: Option<Layout>,
}

/// What such a matrix makes of rows.
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub struct AdaptedRows<B: Backend> {
    /// `[rows, columns out]`.
    pub output: FloatTensor<B>,
    /// `[rows, rank]`: what the first factor reads, a constant.
    pub inner: FloatTensor<B>,
}

/// The gradient of what is beneath an adapter, where it is asked for and whole.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub enum OfBase<B: Backend> {
    Absent,
    Present(FloatTensor<B>),
}

/// The gradients of rows and of the factors, in their dtype.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AdaptedGradients<B: Backend> {
    pub input: FloatTensor<B>,
    pub reads: FloatTensor<B>,
    pub writes: FloatTensor<B>,
    #[extension_type]
    pub base: OfBase<B>,
}

/// The operator of a backend.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cube")
)]
pub trait AdaptedBackend: Backend {
    /// See [`adapted`].
    #[fusion(meta = |input, matrix, _options| metadata(input, matrix))]
    fn adapted(
        input: FloatTensor<Self>,
        #[extension_type] matrix: AdaptedMatrix<Self>,
        options: AdaptedOptions,
    ) -> AdaptedRows<Self>;

    /// Its gradients by that of its output.
    #[fusion(meta = |_gradient, input, _inner, matrix, _options, of_base| {
        gradients_metadata(input, matrix, *of_base)
    })]
    fn adapted_gradients(
        gradient: FloatTensor<Self>,
        input: FloatTensor<Self>,
        inner: FloatTensor<Self>,
        #[extension_type] matrix: AdaptedMatrix<Self>,
        options: AdaptedOptions,
        of_base: bool,
    ) -> AdaptedGradients<Self>;
}

/// What Burn's fusion must know of the rows before they exist.
#[cfg(feature = "cube")]
fn metadata(input: &TensorSpec, matrix: &AdaptedMatrixMetadata) -> AdaptedRowsMetadata {
    let columns = |count| TensorSpec::new(Shape::new([input.shape[0], count]), input.dtype);
    AdaptedRowsMetadata {
        output: columns(matrix.writes.shape[0]),
        inner: columns(matrix.reads.shape[0]),
    }
}

/// The same of the gradients.
#[cfg(feature = "cube")]
fn gradients_metadata(
    input: &TensorSpec,
    matrix: &AdaptedMatrixMetadata,
    of_base: bool,
) -> AdaptedGradientsMetadata {
    AdaptedGradientsMetadata {
        input: input.clone(),
        reads: matrix.reads.clone(),
        writes: matrix.writes.clone(),
        base: match &matrix.base {
            BaseMetadata::Whole(base) if of_base => OfBaseMetadata::Present(base.clone()),
            _ => OfBaseMetadata::Absent,
        },
    }
}
