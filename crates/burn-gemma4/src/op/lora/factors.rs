//! GEMMs with LoRA-adapted matrices, composed from the operations of a backend. An adapter's factors are two narrow
//! matrices.

use super::super::quantized_matmul::{columns_in_slices, rows_in_slices};
use super::{
    AdaptedBackend, AdaptedGradients, AdaptedMatrix, AdaptedOptions, AdaptedRows, Base, OfBase,
};
use crate::op::dequantize::DequantizeBackend;
use burn::{
    backend::{Backend, TensorMetadata, tensor::FloatTensor},
    tensor::{DType, FloatDType},
};

/// A function that multiplies two matrices on a backend.
type Product<B> = fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>;

/// A function that casts two matrices to another dtype, and multiplies the second matrix by the given scale.
type Casts<B> = fn([FloatTensor<B>; 2], f64, FloatDType) -> [FloatTensor<B>; 2];

/// The matmul and cast functions of a backend.
struct Ways<B: Backend> {
    product: Product<B>,
    casts: Casts<B>,
}

/// The tensors and options from which a backend computes GEMMs with an adapted matrix.
struct Parts<B: Backend> {
    base: Base<B>,
    /// The first factor, `[rank, columns in]`, in the dtype of the input rows.
    reads: FloatTensor<B>,
    /// The second factor, `[columns out, rank]`, already multiplied by the scale, in the dtype of the input rows.
    writes: FloatTensor<B>,
    options: AdaptedOptions,
    ways: Ways<B>,
}

/// The message of a panic if the layout of a quantized matrix is missing.
const HAS_LAYOUT: &str = "`AdaptedOptions::layout` is set for quantized matrices";

impl<B: DequantizeBackend> Parts<B> {
    fn new(
        matrix: AdaptedMatrix<B>,
        options: AdaptedOptions,
        dtype: FloatDType,
        ways: Ways<B>,
    ) -> Self {
        let factors = [matrix.reads, matrix.writes];
        let [reads, writes] = (ways.casts)(factors, options.scale, dtype);
        Self {
            base: matrix.base,
            reads,
            writes,
            options,
            ways,
        }
    }

    fn rows(self, input: FloatTensor<B>) -> AdaptedRows<B> {
        let product = self.ways.product;
        let base = match self.base {
            Base::Whole(base) => product(input.clone(), B::float_transpose(base)),
            Base::Quantized(words) => {
                let layout = self.options.layout.expect(HAS_LAYOUT);
                rows_in_slices::<B>(input.clone(), words, layout, product)
            }
        };
        let inner = product(input, B::float_transpose(self.reads));
        let added = product(inner.clone(), B::float_transpose(self.writes));
        AdaptedRows {
            output: B::float_add(base, added),
            inner,
        }
    }

    fn gradients(
        self,
        gradient: FloatTensor<B>,
        input: FloatTensor<B>,
        inner: FloatTensor<B>,
        factors: FloatDType,
        of_base: bool,
    ) -> AdaptedGradients<B> {
        let product = self.ways.product;
        let of_inner = product(gradient.clone(), self.writes);
        let by_factors = product(of_inner.clone(), self.reads);
        let transposed = B::float_transpose(gradient.clone());
        let writes = product(transposed.clone(), inner);
        let reads = product(B::float_transpose(of_inner), input.clone());
        let [reads, writes] = (self.ways.casts)([reads, writes], self.options.scale, factors);
        let (by_base, base) = match self.base {
            Base::Whole(base) => {
                let of_base = match of_base {
                    true => OfBase::Present(product(transposed, input)),
                    false => OfBase::Absent,
                };
                (product(gradient, base), of_base)
            }
            Base::Quantized(words) => {
                let layout = self.options.layout.expect(HAS_LAYOUT);
                let by_base = columns_in_slices::<B>(gradient, words, layout, product);
                (by_base, OfBase::Absent)
            }
        };
        AdaptedGradients {
            input: B::float_add(by_base, by_factors),
            reads,
            writes,
            base,
        }
    }
}

/// Implements [`Casts`] with the backend's own operators.
pub(super) fn casts_by_operators<B: Backend>(
    [first, second]: [FloatTensor<B>; 2],
    scale: f64,
    dtype: FloatDType,
) -> [FloatTensor<B>; 2] {
    let second = match second.dtype() {
        DType::F32 => B::float_cast(B::float_mul_scalar(second, scale.into()), dtype),
        _ => B::float_mul_scalar(B::float_cast(second, dtype), scale.into()),
    };
    [B::float_cast(first, dtype), second]
}

/// Implements the operators for a backend with the given matmul and cast functions.
macro_rules! by {
    ($backend:ty, $product:expr, $casts:expr) => {
        impl AdaptedBackend for $backend {
            fn adapted(
                input: FloatTensor<Self>,
                matrix: AdaptedMatrix<Self>,
                options: AdaptedOptions,
            ) -> AdaptedRows<Self> {
                let dtype = input.dtype().into();
                let (product, casts): (Product<Self>, Casts<Self>) = ($product, $casts);
                let ways = Ways { product, casts };
                Parts::<Self>::new(matrix, options, dtype, ways).rows(input)
            }

            fn adapted_gradients(
                gradient: FloatTensor<Self>,
                input: FloatTensor<Self>,
                inner: FloatTensor<Self>,
                matrix: AdaptedMatrix<Self>,
                options: AdaptedOptions,
                of_base: bool,
            ) -> AdaptedGradients<Self> {
                let (product, casts): (Product<Self>, Casts<Self>) = ($product, $casts);
                let ways = Ways { product, casts };
                let factors = matrix.reads.dtype().into();
                let dtype = input.dtype().into();
                Parts::<Self>::new(matrix, options, dtype, ways)
                    .gradients(gradient, input, inner, factors, of_base)
            }
        }
    };
}

#[cfg(feature = "cube")]
by!(
    burn_cubecl::CubeBackend,
    super::super::linear::product_of_cube,
    super::casts::casts
);
#[cfg(feature = "flex")]
by!(
    burn::backend::Flex,
    <Self as burn::backend::ops::FloatTensorOps<Self>>::float_matmul,
    casts_by_operators::<Self>
);
