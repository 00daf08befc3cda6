//! Products of many rows with quantized matrices: slice by slice of the outputs, whose numbers are made for the product and are gone after
//! it. There is never a whole second copy of a large matrix, nor is one kept for the backward, which makes the slices again.

#[cfg(feature = "cube")]
use super::{
    Matrix,
    few_rows::{self, MOST_ROWS},
};
use super::{QuantizedMatrix, rows as whole_rows};
use crate::{op::dequantize::DequantizeBackend, quantized::layout::Layout};
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

/// Numbers of a slice: 64 MB in f16 or bf16. Layers of up to 5 billion parameters are one, and what writing and reading it costs
/// is little beside a product of hundreds of rows.
const SLICE_NUMBERS: usize = 1 << 25;
/// Rows of a slice are whole tiles of products.
const TILE: usize = 256;

/// `[rows, columns in]` times the transpose of a quantized `[columns out, columns in]`, with the input's gradient.
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
    if (1..=MOST_ROWS).contains(&input.dims()[0]) && crate::op::serve(&input) {
        return few_rows::project(
            input,
            Matrix::from(weight.clone()),
            None,
            few_rows::Origin::Computed,
        );
    }
    in_slices(input, weight, SLICE_NUMBERS)
}

/// [`rows`] with at most so many numbers of the weight at once, but for the rows of one tile.
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

/// The slices of so many outputs.
fn slices(outputs: usize, layout: Layout, numbers: usize) -> impl Iterator<Item = Range<usize>> {
    let at_once = (numbers / layout.columns / TILE).max(1) * TILE;
    let starts = (0..outputs).step_by(at_once);
    starts.map(move |first| first..(first + at_once).min(outputs))
}

/// `[rows, columns out]` times a quantized `[columns out, columns in]`: the gradient by what [`rows`] reads. Constants.
pub(super) fn columns(gradient: Tensor<2>, weight: &QuantizedMatrix) -> Tensor<2> {
    let words = weight.words.clone().without_autodiff();
    Tensor::from_dispatch(Dispatch::quantized_columns(
        gradient.into_dispatch(),
        words.into_dispatch(),
        weight.layout,
    ))
}

/// The gradient of products with quantized matrices as operators of a backend.
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

    /// `product` as it is, which is that of `source` with the transpose of the quantized matrix.
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

/// What Burn's fusion must know of the gradient before it exists.
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
        let product = super::product_of_cube;
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

/// [`rows`] by a backend's product.
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

/// [`columns`] by a backend's product.
pub(super) fn columns_in_slices<B: DequantizeBackend>(
    gradient: FloatTensor<B>,
    words: IntTensor<B>,
    layout: Layout,
    product: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    columns_by_slices::<B>(gradient, words, layout, SLICE_NUMBERS, product)
}

/// [`columns`] by a backend's product, with at most so many numbers of the weight at once, but for the rows of one tile. Several slices are
/// added up in f32.
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
    let first = parts.next().expect("a matrix has a row");
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

/// What the backward of a product needs of it.
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
        unreachable!("gradients are of the first order: the backward runs on the inner backend")
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

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::{
        op::{dequantize::tests, linear::QuantizedMatrix},
        quantized::layout::{Layout, Rounding},
    };
    use burn::tensor::{DType, Device, Distribution, Int, TensorData};

    fn matrix(layout: Layout, rows: usize, device: &Device) -> QuantizedMatrix {
        let words = TensorData::new(tests::even_words(layout, rows), [rows, layout.words()]);
        QuantizedMatrix {
            words: Tensor::<2, Int>::from_data(words, (device, DType::U32)),
            layout,
        }
    }

    fn values(tensor: Tensor<2>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    /// The largest difference from the products in f64, in every row by the largest of them.
    fn error(found: &[f64], input: &[f64], weight: &[f64], columns: usize) -> f64 {
        let outputs = weight.len() / columns;
        let mut most = 0f64;
        for (row, found) in input.chunks_exact(columns).zip(found.chunks_exact(outputs)) {
            let exact: Vec<f64> = weight
                .chunks_exact(columns)
                .map(|weight| row.iter().zip(weight).map(|(x, w)| x * w).sum())
                .collect();
            let scale = exact.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (found, exact) in found.iter().zip(exact) {
                most = most.max((found - exact).abs() / scale);
            }
        }
        most
    }

    /// By the kernel of few rows, where that serves.
    fn by_whole(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
        #[cfg(feature = "cube")]
        if input.dims()[0] <= MOST_ROWS && crate::op::serve(&input) {
            return few_rows::project(input, weight.into(), None, few_rows::Origin::Computed);
        }
        whole_rows(input, weight)
    }

    #[test]
    fn products_are_as_exact_as_those_of_whole_matrices() {
        for device in tests::devices() {
            device.seed(3);
            // Every kernel takes its time to compile: f16 rounds as bf16 does, at the same place.
            let is_another = |layout: &Layout| {
                layout.format.group != Some(96) && layout.format.rounding != Rounding::F16
            };
            for layout in tests::layouts().into_iter().filter(is_another) {
                // More outputs than a cube of any device has, and not a multiple of a team's.
                let outputs = 259;
                let matrix = matrix(layout, outputs, &device);
                let whole = matrix.dequantized(DType::F32);
                let weight = values(whole.clone());
                for (rows, dtype) in cases(&device, layout) {
                    let shape = [rows, layout.columns];
                    let input = Tensor::<2>::random(shape, Distribution::Default, &device);
                    let input = input.cast(dtype);
                    let of_input = values(input.clone());
                    let error = |product: Tensor<2>| {
                        assert_eq!(product.dims(), [rows, outputs]);
                        error(&values(product), &of_input, &weight, layout.columns)
                    };
                    let found = error(super::rows(input.clone(), &matrix));
                    let of_whole = error(by_whole(input, whole.clone().cast(dtype)));
                    let rounding = dtype.finfo().expect("floats").epsilon;
                    assert!(
                        found <= 2.0 * of_whole.max(rounding),
                        "{layout:?}, {rows} rows in {dtype:?} on {device:?}: {found:e}, of whole ones {of_whole:e}"
                    );
                }
            }
        }
    }

    /// Numbers of rows, and dtypes: halves where the device has them, and for the blocks of files alone.
    fn cases(device: &Device, layout: Layout) -> Vec<(usize, DType)> {
        let mut cases = [1, 8, 9].map(|rows| (rows, DType::F32)).to_vec();
        let halves = [DType::F16, DType::BF16].into_iter();
        let halves = halves.filter(|dtype| device.supports_dtype(*dtype));
        if layout.columns == 512 {
            cases.extend(halves.map(|dtype| (1, dtype)));
        }
        cases
    }

    /// Two matrices of one format, of two, and one of them whole; and a factor from some column on.
    #[cfg(feature = "cube")]
    #[test]
    fn gates_are_those_of_whole_matrices() {
        let device = Device::default();
        let layouts = tests::layouts();
        let [first, second] = [&layouts[0], &layouts[7]].map(|layout| matrix(*layout, 70, &device));
        let whole = |matrix: &QuantizedMatrix| Matrix::from(matrix.dequantized(DType::F32));
        let random = |shape| Tensor::<2>::random(shape, Distribution::Default, &device) * 0.01;
        let check = |found: Tensor<2>, expected: Tensor<2>| {
            let (found, expected) = (values(found), values(expected));
            let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.into_iter().zip(expected) {
                let error = (found - expected).abs() / scale;
                assert!(error < 1e-5, "{found}, not {expected}");
            }
        };
        for rows in [1, 5] {
            let input = random([rows, 512]);
            let gates: [(Matrix, Matrix); 4] = [
                (first.clone().into(), first.clone().into()),
                (first.clone().into(), second.clone().into()),
                (whole(&first), second.clone().into()),
                (second.clone().into(), whole(&first)),
            ];
            let expected = [
                [&first; 2],
                [&first, &second],
                [&first, &second],
                [&second, &first],
            ];
            for ((gate, through), [of_gate, of_through]) in gates.into_iter().zip(expected) {
                let gated = |gate, through| {
                    few_rows::multiply(
                        input.clone(),
                        few_rows::Factors::Gated { gate, through },
                        few_rows::Origin::Computed,
                    )
                };
                let found = gated(gate, through);
                check(found, gated(whole(of_gate), whole(of_through)));
            }
            let factor = random([rows, 200]);
            let gate_of = |gate| {
                let factors = few_rows::Factors::GateOf {
                    gate,
                    through: factor.clone(),
                    start: 130,
                };
                few_rows::multiply(input.clone(), factors, few_rows::Origin::Computed)
            };
            check(gate_of(second.clone().into()), gate_of(whole(&second)));
        }
    }

    #[test]
    fn slices_are_the_whole() {
        let device = Device::flex();
        let layout = tests::layouts()[0];
        let matrix = matrix(layout, 3 * TILE + 5, &device);
        let input = Tensor::<2>::random([10, layout.columns], Distribution::Default, &device);
        let weight = values(matrix.dequantized(DType::F32));
        let of_input = values(input.clone());
        let error = |numbers: usize| {
            let found = values(in_slices(input.clone(), &matrix, numbers));
            error(&found, &of_input, &weight, layout.columns)
        };
        let whole = error(usize::MAX);
        for numbers in [1, TILE * layout.columns, 2 * TILE * layout.columns] {
            let found = error(numbers);
            assert!(
                found <= 2.0 * whole,
                "{numbers} at once: {found:e}, at once {whole:e}"
            );
        }
    }

    /// By the product with all numbers, for every size of slices.
    #[test]
    fn gradients_are_those_of_whole_matrices() {
        use burn::backend::{Flex, ops::FloatTensorOps};
        let outputs = 3 * TILE + 5;
        for device in tests::devices() {
            device.seed(5);
            let layouts = tests::layouts();
            for layout in [layouts[0], layouts[5], layouts[9]] {
                let matrix = matrix(layout, outputs, &device);
                let whole = matrix.dequantized(DType::F32);
                let gradient = Tensor::<2>::random([10, outputs], Distribution::Default, &device);
                let expected = values(gradient.clone().matmul(whole));
                let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
                let check = |found: Vec<f64>, what: &str| {
                    assert_eq!(found.len(), expected.len(), "{what}");
                    for (found, expected) in found.into_iter().zip(&expected) {
                        let error = (found - expected).abs() / scale;
                        assert!(error < 1e-5, "{what}: {found}, not {expected}");
                    }
                };
                check(values(columns(gradient.clone(), &matrix)), "at once");
                if device != Device::flex() {
                    continue;
                }
                for numbers in [1, TILE * layout.columns, 2 * TILE * layout.columns] {
                    let gradient = gradient.clone().try_into_primitive::<Flex>();
                    let words = matrix.words.clone().try_into_primitive::<Flex>();
                    let part = columns_by_slices::<Flex>(
                        gradient.expect("of the processor"),
                        words.expect("of the processor"),
                        layout,
                        numbers,
                        Flex::float_matmul,
                    );
                    let found = Tensor::<2>::from_primitive::<Flex>(part);
                    check(values(found), "in slices");
                }
            }
        }
    }
}
