//! Compares GEMMs with quantized matrices, and the gradients of these GEMMs, with the results for dequantized matrices.
//! The results for quantized matrices must be about as exact as the results for dequantized matrices. The kernels
//! dequantize a matrix at once, or in slices of its rows.

use super::*;
use crate::op::dequantize::tests;
use crate::op::linear::QuantizedMatrix;
use crate::quant::layout::{Layout, Rounding};
use burn::tensor::{DType, Device, Distribution, Int, TensorData};
use rand::{Rng, SeedableRng, rngs::StdRng};

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

/// The errors of a GEMM's outputs. The error of an output is its distance from an f64 reference, divided by the largest
/// exact output of the row.
struct Errors {
    largest: f64,
    root_mean_square: f64,
}

impl Errors {
    fn of(found: &[f64], input: &[f64], weight: &[f64], columns: usize) -> Self {
        let (mut largest, mut squares) = (0f64, 0f64);
        let outputs = weight.len() / columns;
        for (row, found) in input.chunks_exact(columns).zip(found.chunks_exact(outputs)) {
            let exact: Vec<f64> = weight
                .chunks_exact(columns)
                .map(|weight| row.iter().zip(weight).map(|(x, w)| x * w).sum())
                .collect();
            let scale = exact.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (found, exact) in found.iter().zip(exact) {
                let error = (found - exact).abs() / scale;
                largest = largest.max(error);
                squares += error * error;
            }
        }
        Self {
            largest,
            root_mean_square: (squares / found.len() as f64).sqrt(),
        }
    }
}

/// Computes a GEMM with f32 accumulators, adding the products in the order of the columns.
fn in_order(input: &[f64], weight: &[f64], columns: usize) -> Vec<f64> {
    let sum = |row: &[f64], weight: &[f64]| -> f32 {
        let products = row.iter().zip(weight).map(|(x, w)| *x as f32 * *w as f32);
        products.sum()
    };
    let rows = input.chunks_exact(columns);
    rows.flat_map(|row| weight.chunks_exact(columns).map(move |w| sum(row, w)))
        .map(f64::from)
        .collect()
}

/// Multiplies `input` by the transpose of the float matrix `weight`. The GEMV kernel is used if it supports the shape.
fn by_whole(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if input.dims()[0] <= GEMV_MAX_ROWS && crate::op::serve(&input) {
        return gemv::project(input, weight.into(), None, gemv::Origin::Computed);
    }
    whole_rows(input, weight)
}

/// Checks two bounds for a GEMM with a quantized matrix. The root mean square error is at most twice the root mean
/// square error of the GEMM with the dequantized float matrix. The largest error is at most twice the largest error of
/// a plain loop, which adds each output's products in f32, one column after the other.
///
/// The factor of two allows for the kernels' different orders of addition.
#[test]
fn rows_are_as_exact_as_with_float_matrices() {
    let mut random = StdRng::seed_from_u64(3);
    for device in tests::devices() {
        // Skip layouts whose groups have 96 columns, and layouts that round elements to f16, because every kernel takes
        // time to compile. The layouts that round elements to bf16 already cover the rounding.
        let is_another = |layout: &Layout| {
            layout.format.group != Some(96) && layout.format.rounding != Rounding::F16
        };
        for layout in tests::layouts().into_iter().filter(is_another) {
            // Use more outputs than a cube of the GEMV kernel has units. The outputs also do not divide evenly among
            // teams, which are groups of units that compute several outputs together.
            let outputs = 259;
            let matrix = matrix(layout, outputs, &device);
            let whole = matrix.dequantized(DType::F32);
            let weight = values(whole.clone());
            for (rows, dtype) in cases(&device, layout) {
                let shape = [rows, layout.columns];
                // Use small inputs, so that the outputs do not exceed f16's range.
                let numbers: Vec<f32> = (0..rows * layout.columns)
                    .map(|_| random.random::<f32>() / 64.0)
                    .collect();
                let input = Tensor::<2>::from_data(TensorData::new(numbers, shape), &device);
                let input = input.cast(dtype);
                let of_input = values(input.clone());
                let errors = |found: &[f64]| Errors::of(found, &of_input, &weight, layout.columns);
                let of_product = |product: Tensor<2>| {
                    assert_eq!(product.dims(), [rows, outputs]);
                    errors(&values(product))
                };
                let found = of_product(super::rows(input.clone(), &matrix));
                let of_whole = of_product(by_whole(input, whole.clone().cast(dtype)));
                let in_order = errors(&in_order(&of_input, &weight, layout.columns));
                let rounding = dtype.finfo().expect("the dtype is a float").epsilon;
                let what = format!("{layout:?}, {rows} rows in {dtype:?} on {device:?}");
                let (largest, bound) = (found.largest, in_order.largest.max(rounding));
                assert!(
                    largest <= 2.0 * bound,
                    "{what}: largest error {largest:e}, plain sums {bound:e}"
                );
                let (mean, bound) = (found.root_mean_square, of_whole.root_mean_square);
                assert!(
                    mean <= 2.0 * bound,
                    "{what}: mean error {mean:e}, float matrix {bound:e}"
                );
            }
        }
    }
}

/// Returns the test cases. Each case is the number of input rows, and the dtype of the rows. Half precision is tested
/// only for GGUF blocks, if the device supports half precision.
fn cases(device: &Device, layout: Layout) -> Vec<(usize, DType)> {
    let mut cases = [1, 8, 9].map(|rows| (rows, DType::F32)).to_vec();
    let halves = [DType::F16, DType::BF16].into_iter();
    let halves = halves.filter(|dtype| device.supports_dtype(*dtype));
    if layout.columns == 512 {
        cases.extend(halves.map(|dtype| (1, dtype)));
    }
    cases
}

/// Compares GeGLU of quantized matrices with GeGLU of the dequantized matrices. The gate and the up projection have
/// equal or different formats, or one of them is a float matrix. The last case has no up projection. Instead, the GELU
/// of the gate projection multiplies columns of a given tensor, starting at column 130.
#[cfg(feature = "cube")]
#[test]
fn gates_of_quantized_matrices_match_float_matrices() {
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
            assert!(error < 1e-5, "got {found}, expected {expected}");
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
                gemv::multiply(
                    input.clone(),
                    gemv::Factors::Gated { gate, through },
                    gemv::Origin::Computed,
                )
            };
            let found = gated(gate, through);
            check(found, gated(whole(of_gate), whole(of_through)));
        }
        let factor = random([rows, 200]);
        let gate_of = |gate| {
            let factors = gemv::Factors::GateOf {
                gate,
                through: factor.clone(),
                start: 130,
            };
            gemv::multiply(input.clone(), factors, gemv::Origin::Computed)
        };
        check(gate_of(second.clone().into()), gate_of(whole(&second)));
    }
}

#[test]
fn rows_in_slices_are_as_exact_as_at_once() {
    let device = Device::flex();
    let layout = tests::layouts()[0];
    let matrix = matrix(layout, 3 * TILE + 5, &device);
    let input = Tensor::<2>::random([10, layout.columns], Distribution::Default, &device);
    let weight = values(matrix.dequantized(DType::F32));
    let of_input = values(input.clone());
    let error = |numbers: usize| {
        let found = values(in_slices(input.clone(), &matrix, numbers));
        Errors::of(&found, &of_input, &weight, layout.columns).largest
    };
    let whole = error(usize::MAX);
    for numbers in [1, TILE * layout.columns, 2 * TILE * layout.columns] {
        let found = error(numbers);
        assert!(
            found <= 2.0 * whole,
            "{numbers} weights at once: error {found:e}, whole matrix {whole:e}"
        );
    }
}

/// Compares the input's gradient with the gradient that the dequantized matrix gives. On the CPU the gradient is also
/// computed in slices of several sizes.
#[test]
fn columns_match_dequantized_matrix() {
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
                    assert!(error < 1e-5, "{what}: got {found}, expected {expected}");
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
                    gradient.expect("the tensor is on the Flex backend"),
                    words.expect("the tensor is on the Flex backend"),
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
