//! GEMMs with LoRA-adapted matrices. Each GEMM is one operator with its own backward. With Burn's own operators each
//! adapted matrix would need nine launches in the forward, and twice as many in the backward.

mod autodiff;
#[cfg(feature = "cube")]
mod casts;
mod factors;

pub(in crate::op) use autodiff::SavedMatrix;

use super::linear::Matrix;
use crate::quant::layout::Layout;
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

/// Computes `input · baseᵀ + input · readsᵀ · writesᵀ · scale` for `input`, `[rows, columns in]`. The factors `reads`
/// and `writes` are cast to the input's dtype. The matrix `writes · reads` and its gradient are never stored.
pub(crate) fn lora_product(input: Tensor<2>, base: Matrix, adapter: &LoraAdapter) -> Tensor<2> {
    let (matrix, options) = parts(base, adapter);
    let rows = Dispatch::adapted(input.into_dispatch(), matrix, options);
    Tensor::from_dispatch(rows.output)
}

/// Returns the tensors and options of an adapted matrix for the backend operators.
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

/// The base matrix of an adapter, `[columns out, columns in]`.
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub enum Base<B: Backend> {
    Whole(FloatTensor<B>),
    /// The packed words of quantized rows.
    Quantized(IntTensor<B>),
}

/// A base matrix and its adapter. The adapter's factors are `reads`, `[rank, columns in]`, and `writes`,
/// `[columns out, rank]`.
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub struct AdaptedMatrix<B: Backend> {
    #[extension_type]
    pub base: Base<B>,
    pub reads: FloatTensor<B>,
    pub writes: FloatTensor<B>,
}

/// The options of an adapted matrix. The options are on the host, separate from the device tensors of
/// [`AdaptedMatrix`].
#[derive(Clone, Copy, Debug)]
pub struct AdaptedOptions {
    /// The scale that multiplies the adapter's output.
    pub scale: f64,
    /// The layout of a quantized base matrix.
    pub layout: Option<Layout>,
}

/// The output of a GEMM with an adapted matrix, and an intermediate result for the backward.
#[derive(ExtensionType, Debug, Clone)]
#[extension_type(fusion)]
pub struct AdaptedRows<B: Backend> {
    /// The output, `[rows, columns out]`.
    pub output: FloatTensor<B>,
    /// The input rows times the transpose of the first factor, `[rows, rank]`, without autodiff.
    pub inner: FloatTensor<B>,
}

/// The gradient with respect to the base matrix, if it was requested and the base matrix is not quantized.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub enum OfBase<B: Backend> {
    Absent,
    Present(FloatTensor<B>),
}

/// The gradients with respect to the input rows, the factors and the base matrix, each in the dtype of its tensor.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AdaptedGradients<B: Backend> {
    pub input: FloatTensor<B>,
    pub reads: FloatTensor<B>,
    pub writes: FloatTensor<B>,
    #[extension_type]
    pub base: OfBase<B>,
}

/// The backend operators for a GEMM with an adapted matrix and for its gradients.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cube")
)]
pub trait AdaptedBackend: Backend {
    /// See [`lora_product`].
    #[fusion(meta = |input, matrix, _options| metadata(input, matrix))]
    fn adapted(
        input: FloatTensor<Self>,
        #[extension_type] matrix: AdaptedMatrix<Self>,
        options: AdaptedOptions,
    ) -> AdaptedRows<Self>;

    /// Returns the gradients of [`adapted`](Self::adapted), from the gradient of its output.
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

/// Returns the shapes and dtypes of the outputs, which Burn's fusion needs before it runs the operator.
#[cfg(feature = "cube")]
fn metadata(input: &TensorSpec, matrix: &AdaptedMatrixMetadata) -> AdaptedRowsMetadata {
    let columns = |count| TensorSpec::new(Shape::new([input.shape[0], count]), input.dtype);
    AdaptedRowsMetadata {
        output: columns(matrix.writes.shape[0]),
        inner: columns(matrix.reads.shape[0]),
    }
}

/// Returns the shapes and dtypes of the gradients, which Burn's fusion needs before it runs the operator.
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
