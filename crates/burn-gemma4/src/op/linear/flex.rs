//! GEMMs on the CPU that read the weights in the form in which the model stores them.
//!
//! Burn's matmul would convert all weights to f32 for every GEMM, and a quantized matrix would have to be dequantized
//! first. A GEMM of few rows is bound by memory bandwidth, so [`cpu_gemv`] converts the weights in registers. Where the
//! CPU multiplies codes or bf16 pairs faster than f32, it multiplies many rows, too. Any other GEMM of more rows
//! converts only a few weight rows at a time, so that the converted rows stay in the CPU cache.

use super::QuantizedMatrix;
use crate::quant::layout::Layout;
use burn::{
    backend::{
        Backend, Dispatch, DispatchDevice, Flex, backend_extension,
        ops::FloatTensorOps,
        tensor::{Device, FloatTensor, IntTensor},
    },
    tensor::{DType, Tensor, TensorData, bf16, f16},
};
use cpu_gemv::{CHUNK, Rows, Weights, max_rows, multiply, parallel};
use std::{borrow::Cow, cell::RefCell};

/// The number of f32 weights that a thread multiplies at once: 512 KB, half of a core's L2 cache.
const BLOCK: usize = 1 << 17;

/// True if [`rows_of_words`] can multiply this input. The tensor must be on the CPU in f32, f16 or bf16, and autodiff
/// must not track the tensor.
pub(crate) fn serves_words(input: &Tensor<2>) -> bool {
    let device = input.device();
    matches!(input.dtype(), DType::F32 | DType::F16 | DType::BF16)
        && !device.is_autodiff()
        && matches!(device.as_dispatch(), DispatchDevice::Flex(_))
}

/// True if [`rows_of_floats`] multiplies the input faster than Burn's matmul, and neither tensor is on an autodiff
/// device.
pub(super) fn serves(input: &Tensor<2>, weight: &Tensor<2>) -> bool {
    let rows = input.dims()[0];
    let is_fast = input.dtype() != DType::F32 || rows <= CHUNK;
    is_fast && rows > 0 && serves_words(input) && !weight.device().is_autodiff()
}

/// Multiplies `[rows, columns in]` by the transpose of `weight`, `[columns out, columns in]`. Both tensors must have
/// the same dtype.
pub(super) fn rows_of_floats(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let (input, weight) = (input.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(Dispatch::rows_of_floats(input, weight))
}

/// Multiplies `[rows, columns in]` by the transpose of a quantized matrix, `[columns out, columns in]`.
pub(crate) fn rows_of_words(input: Tensor<2>, weight: &QuantizedMatrix) -> Tensor<2> {
    let words = weight.words.clone().without_autodiff().into_dispatch();
    Tensor::from_dispatch(Dispatch::rows_of_words(
        input.into_dispatch(),
        words,
        weight.layout,
    ))
}

/// The backend operators that compute the GEMMs.
#[backend_extension(Flex)]
pub trait StoredProductBackend: Backend {
    /// See [`rows_of_floats`].
    fn rows_of_floats(input: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;

    /// See [`rows_of_words`].
    fn rows_of_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self>;
}

impl StoredProductBackend for Flex {
    fn rows_of_floats(input: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let weight = weight.to_contiguous();
        assert_eq!(
            input.dtype(),
            weight.dtype(),
            "weights: expected the input's dtype"
        );
        let shape = weight.layout().shape();
        let (columns, count) = (shape[1], shape[0] * shape[1]);
        let first = weight.layout().start_offset();
        let weights = match weight.dtype() {
            DType::F16 => Weights::F16(&weight.storage::<f16>()[first..][..count]),
            DType::BF16 => Weights::Bf16(&weight.storage::<bf16>()[first..][..count]),
            _ => Weights::F32(&weight.storage::<f32>()[first..][..count]),
        };
        rows_of(input, weights, columns)
    }

    fn rows_of_words(
        input: FloatTensor<Self>,
        words: IntTensor<Self>,
        layout: Layout,
    ) -> FloatTensor<Self> {
        let words = words.to_contiguous();
        assert_eq!(
            words.layout().shape()[1],
            layout.words(),
            "quantized weights: expected the words of the layout in each row"
        );
        let first = words.layout().start_offset();
        let count = words.layout().shape()[0] * layout.words();
        let all = &words.storage::<u32>()[first..][..count];
        rows_of(input, Weights::Words(all, layout), layout.columns)
    }
}

fn rows_of(input: FloatTensor<Flex>, weights: Weights, columns: usize) -> FloatTensor<Flex> {
    let input = input.to_contiguous();
    let (dtype, rows) = (input.dtype(), input.layout().shape()[0]);
    assert_eq!(
        input.layout().shape()[1],
        columns,
        "input: expected the columns of the weights"
    );
    let first = input.layout().start_offset();
    let elements = first..first + rows * columns;
    let outputs = weights.outputs(columns);
    let mut output = vec![0.0; rows * outputs];
    let is_read_as_stored = rows <= max_rows(&weights, dtype == DType::BF16);
    match dtype {
        _ if rows == 0 => {}
        DType::BF16 if is_read_as_stored => {
            let input = Rows::Bf16(&input.storage::<bf16>()[elements]);
            multiply(input, columns, weights, &mut output);
        }
        _ => {
            let numbers: Cow<[f32]> = match dtype {
                DType::F16 => {
                    let numbers = input.storage::<f16>()[elements].iter();
                    numbers.map(|number| number.to_f32()).collect()
                }
                DType::BF16 => {
                    let numbers = input.storage::<bf16>()[elements].iter();
                    numbers.map(|number| number.to_f32()).collect()
                }
                _ => input.storage::<f32>()[elements].into(),
            };
            match is_read_as_stored {
                true => multiply(Rows::F32(&numbers), columns, weights, &mut output),
                false => multiply_blocks(&numbers, columns, weights, &mut output),
            }
        }
    }
    let data = TensorData::new(output, [rows, outputs]).convert_dtype(dtype);
    Flex::float_from_data(data, &Device::<Flex>::default())
}

/// Multiplies any number of rows. Each thread converts a block of the weights' rows to f32, and multiplies by this
/// block.
fn multiply_blocks(input: &[f32], columns: usize, weights: Weights, output: &mut [f32]) {
    thread_local! {
        static NUMBERS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    }
    let rows = input.len() / columns;
    let outputs = output.len() / rows;
    let of_block = (BLOCK / columns).clamp(16, 256);
    let output = Output(output.as_mut_ptr());
    parallel(outputs.div_ceil(of_block), |block| {
        let first = block * of_block;
        let count = of_block.min(outputs - first);
        NUMBERS.with_borrow_mut(|numbers| {
            numbers.resize(numbers.len().max(count * columns), 0.0);
            let numbers = &mut numbers[..count * columns];
            weights.dequantize(first..first + count, columns, numbers);
            // SAFETY: the strides describe `[rows, columns]` of the input, the transpose of the block, and columns of
            // the output that no other block writes.
            unsafe {
                gemm::gemm(
                    rows,
                    count,
                    columns,
                    output.at(first),
                    1,
                    outputs as isize,
                    false,
                    input.as_ptr(),
                    1,
                    columns as isize,
                    numbers.as_ptr(),
                    columns as isize,
                    1,
                    0.0,
                    1.0,
                    false,
                    false,
                    false,
                    gemm::Parallelism::None,
                );
            }
        });
    });
}

/// The output of a product. Several threads write to the output, each to its own columns.
struct Output(*mut f32);

// SAFETY: no two threads write the same column.
unsafe impl Sync for Output {}

impl Output {
    /// Returns a pointer to the first row's element at `column`, which must be within the row.
    fn at(&self, column: usize) -> *mut f32 {
        // SAFETY: the column is within the first row.
        unsafe { self.0.add(column) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::dequantize::{
        dequantize,
        tests::{even_words, layouts},
    };
    use burn::tensor::{Device, Distribution, Int};

    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

    fn drawn(shape: [usize; 2], dtype: DType) -> Tensor<2> {
        let drawn = Tensor::<2>::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex());
        drawn.cast(dtype)
    }

    /// The number of elements from which the errors of two products can be compared. The error of a few elements is a
    /// matter of chance.
    const ENOUGH: usize = 1000;

    /// The errors of products of one kind.
    #[derive(Default)]
    struct Errors {
        /// The sum of the squares of the errors.
        found: f64,
        /// The same of Burn's matmul.
        of_matmul: f64,
        elements: usize,
    }

    impl Errors {
        /// Adds the product `found` of `input` and `weight`. `exact` is the weight before it is rounded to the input's
        /// dtype.
        fn add(&mut self, found: Tensor<2>, input: Tensor<2>, weight: Tensor<2>, exact: Tensor<2>) {
            assert_eq!(found.dtype(), input.dtype());
            let expected = input
                .clone()
                .cast(DType::F64)
                .matmul(exact.cast(DType::F64).transpose());
            let error = |product: Tensor<2>| {
                let difference = product.cast(DType::F64) - expected.clone();
                difference.square().sum().into_scalar::<f64>()
            };
            self.found += error(found);
            self.of_matmul += error(input.matmul(weight.transpose()));
            self.elements += expected.shape().num_elements();
        }

        /// Checks that the products have at most twice the error (RMS) of Burn's matmul.
        fn check(&self, what: &str) {
            let [found, of_matmul] = [self.found, self.of_matmul].map(f64::sqrt);
            assert!(
                found <= 2.0 * of_matmul,
                "{what}: error {found}, of matmul {of_matmul}"
            );
        }
    }

    #[test]
    fn rows_of_floats_has_at_most_twice_the_error_of_matmul() {
        Device::flex().seed(1);
        for dtype in DTYPES {
            for rows in [1, 3, CHUNK, CHUNK + 1, 70] {
                for (outputs, columns) in [(1, 300), (150, 257), (530, 1024)] {
                    let mut errors = Errors::default();
                    while errors.elements < ENOUGH {
                        let (input, weight) = (
                            drawn([rows, columns], dtype),
                            drawn([outputs, columns], dtype),
                        );
                        let found = rows_of_floats(input.clone(), weight.clone());
                        errors.add(found, input, weight.clone(), weight);
                    }
                    errors.check(&format!("{dtype:?}, {rows} rows, {outputs} by {columns}"));
                }
            }
        }
    }

    #[test]
    fn rows_of_words_has_at_most_twice_the_error_of_matmul() {
        let device = Device::flex();
        device.seed(2);
        let all = 37;
        for layout in layouts() {
            let of_row = layout.words();
            let data = TensorData::new(even_words(layout, all), [all, of_row]);
            let words = Tensor::<2, Int>::from_data(data, (&device, DType::U32));
            // Multiply by a slice of the rows, so that the first row does not begin at the start of the buffer.
            let weight = QuantizedMatrix { words, layout }.rows(5, 30);
            let whole = |dtype| dequantize(weight.words.clone(), layout, dtype);
            for dtype in DTYPES {
                for rows in [1, 4, CHUNK + 1] {
                    let mut errors = Errors::default();
                    while errors.elements < ENOUGH {
                        let input = drawn([rows, layout.columns], dtype);
                        let found = rows_of_words(input.clone(), &weight);
                        errors.add(found, input, whole(dtype), whole(DType::F32));
                    }
                    errors.check(&format!("{layout:?}, {dtype:?}, {rows} rows"));
                }
            }
        }
    }

    #[test]
    fn rows_of_floats_with_strided_tensors_reads_their_elements() {
        let mut errors = Errors::default();
        while errors.elements < ENOUGH {
            let (input, weight) = (drawn([7, 5], DType::BF16), drawn([7, 9], DType::BF16));
            let found = rows_of_floats(input.clone().transpose(), weight.clone().transpose());
            let weight = weight.transpose();
            errors.add(found, input.transpose(), weight.clone(), weight);
        }
        errors.check("transposed");
    }
}
