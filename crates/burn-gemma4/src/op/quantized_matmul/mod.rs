//! GEMMs with quantized matrices. A large matrix is dequantized and multiplied in slices, which are ranges of its rows.
//! Each slice is freed after its GEMM, so that the whole matrix never exists in floats. The backward dequantizes the
//! slices again.

#[cfg(all(test, feature = "flex"))]
mod tests;

#[cfg(feature = "cube")]
use super::gemv;
#[cfg(feature = "cube")]
use super::gemv::GEMV_MAX_ROWS;
#[cfg(feature = "cube")]
use super::linear::Matrix;
use super::linear::{QuantizedMatrix, whole_rows};
use crate::op::dequantize::DequantizeBackend;
use crate::quant::layout::Layout;
#[cfg(feature = "cube")]
use burn::{backend::fusion::custom::TensorSpec, tensor::Shape};
use burn::{
    backend::{
        Autodiff, Backend, Dispatch, TensorMetadata,
        autodiff::{
            checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
            grads::Gradients,
            ops::{Backward, Ops, OpsKind},
        },
        backend_extension,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{FloatDType, Slice, Tensor},
};
use std::ops::Range;

/// The largest number of weights in a slice. A slice of this size takes 64 MB in f16 or bf16. In models with up to 5
/// billion parameters each matrix of a layer is one slice.
const SLICE_NUMBERS: usize = 1 << 25;
/// The number of matrix rows in a GEMM tile. Every slice except the last has a multiple of this number of rows.
const TILE: usize = 256;

/// Multiplies `[rows, columns in]` by the transpose of a quantized matrix, `[columns out, columns in]`. Autodiff tracks
/// the input.
pub(super) fn rows(input: Tensor<2>, weight: &QuantizedMatrix) -> Tensor<2> {
    if !input.device().is_autodiff() {
        return constant_rows(input, weight);
    }
    let constants = QuantizedMatrix {
        words: weight.words.clone().without_autodiff(),
        layout: weight.layout,
    };
    let product = constant_rows(input.clone().inner(), &constants);
    Tensor::from_dispatch(Dispatch::through_quantized(
        product.into_dispatch(),
        input.into_dispatch(),
        constants.words.into_dispatch(),
        constants.layout,
    ))
}

fn constant_rows(input: Tensor<2>, weight: &QuantizedMatrix) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if (1..=GEMV_MAX_ROWS).contains(&input.dims()[0]) && crate::op::serve(&input) {
        return gemv::project(
            input,
            Matrix::from(weight.clone()),
            None,
            gemv::Origin::Computed,
        );
    }
    #[cfg(feature = "flex")]
    if super::linear::serves_words(&input) {
        return super::linear::rows_of_words(input, weight);
    }
    in_slices(input, weight, SLICE_NUMBERS)
}

/// Computes [`rows`] in slices of the matrix. A slice has at most `numbers` weights, but never fewer rows than one GEMM
/// tile.
fn in_slices(input: Tensor<2>, weight: &QuantizedMatrix, numbers: usize) -> Tensor<2> {
    let [outputs, _] = weight.words.dims();
    let product = |slice: Range<usize>| {
        let slice = weight.rows(slice.start, slice.len());
        whole_rows(input.clone(), slice.dequantized(input.dtype()))
    };
    let mut slices: Vec<Tensor<2>> = slices(outputs, weight.layout, numbers)
        .map(product)
        .collect();
    match slices.len() {
        1 => slices.remove(0),
        _ => Tensor::cat(slices, 1),
    }
}

/// Divides the matrix's `outputs` rows into slices. A slice has at most `numbers` weights, but never fewer rows than
/// one GEMM tile.
fn slices(outputs: usize, layout: Layout, numbers: usize) -> impl Iterator<Item = Range<usize>> {
    let at_once = (numbers / layout.columns / TILE).max(1) * TILE;
    let starts = (0..outputs).step_by(at_once);
    starts.map(move |first| first..(first + at_once).min(outputs))
}

/// Multiplies `[rows, columns out]` by a quantized matrix, `[columns out, columns in]`, without autodiff. This product
/// is the gradient of [`rows`] with respect to its input.
pub(super) fn columns(gradient: Tensor<2>, weight: &QuantizedMatrix) -> Tensor<2> {
    let words = weight.words.clone().without_autodiff();
    Tensor::from_dispatch(Dispatch::quantized_columns(
        gradient.into_dispatch(),
        words.into_dispatch(),
        weight.layout,
    ))
}

/// The gradient of GEMMs with quantized matrices, as operators of a backend.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cube")
)]
pub trait QuantizedProductBackend: Backend {
    /// See [`columns`].
    #[fusion(meta = |gradient, _words, layout| metadata(gradient, layout))]
    fn quantized_columns(
        gradient: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self>;

    /// Returns `product` unchanged, and registers the backward with respect to `source`. The caller has computed
    /// `product`, which must be `source` times the transpose of the quantized matrix.
    #[fusion(default)]
    fn through_quantized(
        product: FloatTensor<Self>,
        _source: FloatTensor<Self>,
        _words: IntTensor<Self>,
        _layout: Layout,
    ) -> FloatTensor<Self> {
        product
    }
}

/// Returns the shape and dtype of the gradient, which Burn's fusion needs before it runs the operator.
#[cfg(feature = "cube")]
fn metadata(gradient: &TensorSpec, layout: &Layout) -> TensorSpec {
    let shape = [gradient.shape[0], layout.columns];
    TensorSpec::new(Shape::new(shape), gradient.dtype)
}

#[cfg(feature = "cube")]
impl QuantizedProductBackend for burn_cubecl::CubeBackend {
    fn quantized_columns(
        gradient: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self> {
        let product = super::linear::product_of_cube;
        columns_in_slices::<Self>(gradient, words, layout, product)
    }
}

#[cfg(feature = "flex")]
impl QuantizedProductBackend for burn::backend::Flex {
    fn quantized_columns(
        gradient: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self> {
        use burn::backend::ops::FloatTensorOps;
        let product = Self::float_matmul;
        columns_in_slices::<Self>(gradient, words, layout, product)
    }
}

/// Computes [`rows`] slice by slice with the given matmul function.
pub(super) fn rows_in_slices<B: DequantizeBackend>(
    input: FloatTensor<B>,
    words: IntTensor<B>,
    layout: Layout,
    product: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let part = |slice: Range<usize>| {
        let of_words = [Slice::from(slice), Slice::from(0..layout.words())];
        let words = B::int_slice(words.clone(), &of_words);
        let weight = <B as DequantizeBackend>::dequantize(words, layout, input.dtype());
        product(input.clone(), B::float_transpose(weight))
    };
    let mut parts: Vec<_> = slices(words.shape()[0], layout, SLICE_NUMBERS)
        .map(part)
        .collect();
    match parts.len() {
        1 => parts.remove(0),
        _ => B::float_cat(parts, 1),
    }
}

/// Computes [`columns`] slice by slice with the given matmul function.
pub(super) fn columns_in_slices<B: DequantizeBackend>(
    gradient: FloatTensor<B>,
    words: IntTensor<B>,
    layout: Layout,
    product: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    columns_by_slices::<B>(gradient, words, layout, SLICE_NUMBERS, product)
}

/// Computes [`columns`] with the given matmul function, in slices of the matrix. A slice has at most `numbers` weights,
/// but never fewer rows than one GEMM tile. The results of the slices are added in f32.
fn columns_by_slices<B: DequantizeBackend>(
    gradient: FloatTensor<B>,
    words: IntTensor<B>,
    layout: Layout,
    numbers: usize,
    product: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let (dtype, shape) = (gradient.dtype(), gradient.shape());
    let [rows, outputs] = [shape[0], shape[1]];
    let part = |slice: Range<usize>| {
        let all = |size: usize| Slice::from(0..size);
        let of_words = [Slice::from(slice.clone()), all(layout.words())];
        let of_gradient = [all(rows), Slice::from(slice)];
        let words = B::int_slice(words.clone(), &of_words);
        let weight = <B as DequantizeBackend>::dequantize(words, layout, dtype);
        product(B::float_slice(gradient.clone(), &of_gradient), weight)
    };
    let mut parts = slices(outputs, layout, numbers).map(part);
    let first = parts.next().expect("the matrix has at least one row");
    let mut sum: Option<FloatTensor<B>> = None;
    for part in parts {
        let before = match sum.take() {
            Some(sum) => sum,
            None => B::float_cast(first.clone(), FloatDType::F32),
        };
        sum = Some(B::float_add(before, B::float_cast(part, FloatDType::F32)));
    }
    match sum {
        Some(sum) => B::float_cast(sum, dtype.into()),
        None => first,
    }
}

/// The quantized matrix that a GEMM saves for its backward.
#[derive(Clone, Debug)]
struct Quantized<B: Backend> {
    words: IntTensor<B>,
    layout: Layout,
}

#[derive(Debug)]
struct ProductBackward;

impl<B: QuantizedProductBackend> Backward<B, 1> for ProductBackward {
    type State = Quantized<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        gradients: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [source] = ops.parents;
        let gradient = gradients.consume::<B>(&ops.node);
        if let Some(source) = source {
            let Quantized { words, layout } = ops.state;
            gradients.register::<B>(source.id, B::quantized_columns(gradient, words, layout));
        }
    }
}

impl<B: QuantizedProductBackend, C: CheckpointStrategy> QuantizedProductBackend for Autodiff<B, C> {
    fn quantized_columns(
        _gradient: FloatTensor<Self>,
        _words: IntTensor<Self>,
        _layout: Layout,
    ) -> FloatTensor<Self> {
        unreachable!(
            "second-order gradients are unsupported: the backward runs on the inner backend"
        )
    }

    fn through_quantized(
        product: FloatTensor<Self>,
        source: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self> {
        match ProductBackward
            .prepare::<C>([source.node()])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(preparation) => {
                preparation.finish(Quantized { words, layout }, product.into_primitive())
            }
            OpsKind::UnTracked(preparation) => preparation.finish(product.into_primitive()),
        }
    }
}
