//! Integration into Burn: the extension trait [`AttentionBackend`] with the forward, the backward, quantization, and
//! appending to pages. Every backend to which Burn dispatches implements the trait.
//!
//! | backend | implementation |
//! |---|---|
//! | CubeCL devices, with or without Burn's fusion | the kernel that [`select`](crate::select) chooses (`cube.rs`) |
//! | flex | Burn's own operations on [blocks](crate::blocks), which are also the trait's default bodies |
//! | autodiff over any of these | a separate node in Burn's graph (`autodiff.rs`) |

mod autodiff;
#[cfg(feature = "cube")]
mod cube;

use crate::blocks;
use crate::error::AttentionError;
use crate::problem::AttentionProblem;
use crate::reference;
use crate::types::quantized::CodeFormat;
use crate::types::request::BackwardRequest;
use crate::types::tensors::*;
use burn::backend::{
    Backend, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Device};

/// The devices on which this build of the crate can compute attention.
const SERVED: &str = match (cfg!(feature = "cube"), cfg!(feature = "flex")) {
    (true, true) => "CubeCL devices and Flex",
    (true, false) => "CubeCL devices",
    (false, true) => "Flex",
    (false, false) => "no device: enable a backend feature such as `cuda`, `wgpu` or `flex`",
};

/// Returns [`AttentionError::Backend`] if attention does not support the device's backend. Without this check, Burn's
/// dispatch would panic.
pub(crate) fn check_backend(device: &Device) -> Result<(), AttentionError> {
    let device = device.clone().without_autodiff();
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        burn::backend::DispatchDevice::Cube(_) => Ok(()),
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => Ok(()),
        #[allow(
            unreachable_patterns,
            reason = "with no other backend compiled in, the arms above cover all devices"
        )]
        other => Err(AttentionError::Backend {
            device: format!("{other:?}"),
            served: SERVED,
        }),
    }
}

/// Computes the shapes and dtypes of the results, which Burn's fusion needs before the results exist.
#[cfg(feature = "cube")]
mod metadata {
    use super::*;
    use crate::types::quantized::CODES;
    use burn::backend::fusion::custom::TensorSpec;
    use burn::tensor::Shape;

    pub fn of_forward(
        inputs: &AttentionInputsMetadata,
        problem: &AttentionProblem,
    ) -> AttentionOutputMetadata {
        of_results(inputs.query.dtype, problem)
    }

    fn of_results(dtype: DType, problem: &AttentionProblem) -> AttentionOutputMetadata {
        AttentionOutputMetadata {
            output: TensorSpec::new(Shape::new(problem.output_shape()), dtype),
            logsumexp: TensorSpec::new(
                Shape::new(problem.logsumexp_parts_shape()),
                logsumexp_dtype(problem),
            ),
        }
    }

    pub fn of_quantized_forward(
        inputs: &QuantizedInputsMetadata,
        problem: &AttentionProblem,
    ) -> AttentionOutputMetadata {
        of_results(inputs.query.dtype, problem)
    }

    pub fn of_quantize(rows: &TensorSpec) -> QuantizedTensorsMetadata {
        let [batch, heads, length, columns] = [0, 1, 2, 3].map(|dim| rows.shape[dim]);
        QuantizedTensorsMetadata {
            words: TensorSpec::new(
                Shape::new([batch, heads, length, columns / CODES]),
                DType::I32,
            ),
            scales: TensorSpec::new(Shape::new([batch, heads, length]), DType::F32),
        }
    }

    pub fn of_e4m3_words(rows: &TensorSpec, _scales: &TensorSpec) -> TensorSpec {
        of_quantize(rows).words
    }

    pub fn of_dequantize(
        rows: &QuantizedTensorsMetadata,
        _format: &CodeFormat,
        dtype: &DType,
    ) -> TensorSpec {
        let words = &rows.words.shape;
        let [batch, heads, length, words] = [0, 1, 2, 3].map(|dim| words[dim]);
        TensorSpec::new(Shape::new([batch, heads, length, words * CODES]), *dtype)
    }

    pub fn of_backward(
        inputs: &AttentionInputsMetadata,
        _saved: &AttentionSavedMetadata,
        _problem: &AttentionProblem,
        request: &BackwardRequest,
    ) -> AttentionGradientsMetadata {
        let wanted = |input: &MaybeFloatMetadata, wanted: bool| {
            if wanted {
                input.clone()
            } else {
                MaybeFloatMetadata::Absent
            }
        };
        let operand = |input: &TensorSpec, is_wanted: bool| {
            wanted(&MaybeFloatMetadata::Present(input.clone()), is_wanted)
        };
        AttentionGradientsMetadata {
            query: operand(&inputs.query, request.query),
            key: operand(&inputs.key, request.key),
            value: operand(&inputs.value, request.value),
            bias: wanted(&inputs.bias, request.bias),
            sinks: wanted(&inputs.sinks, request.sinks),
            table: wanted(&inputs.score_table, request.table),
        }
    }
}

/// Fused attention as an operator of a Burn backend.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cube")
)]
pub trait AttentionBackend: Backend {
    /// Returns the output and the logsumexp of a validated problem. The logsumexp has two parts: the score that the
    /// softmax subtracted, and the logarithm of the softmax sum.
    #[fusion(meta = metadata::of_forward)]
    fn attention_forward(
        #[extension_type] inputs: AttentionInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        blocks::forward::<Self>(inputs, &problem)
    }

    /// Returns the gradients of a validated problem.
    #[fusion(meta = metadata::of_backward)]
    fn attention_backward(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] saved: AttentionSaved<Self>,
        problem: AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<Self> {
        blocks::backward::<Self>(inputs, saved, &problem, request)
    }

    /// Returns the output and the logsumexp of a validated problem over quantized keys and values. The logsumexp has
    /// two parts: the score that the softmax subtracted, and the logarithm of the softmax sum.
    #[fusion(meta = metadata::of_quantized_forward)]
    fn quantized_attention_forward(
        #[extension_type] inputs: QuantizedInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        forward_of_copy::<Self>(inputs, problem)
    }

    /// Quantizes float rows to int8. The number of columns is a multiple of 4.
    #[fusion(meta = metadata::of_quantize)]
    fn quantize_rows(rows: FloatTensor<Self>) -> QuantizedTensors<Self> {
        reference::quantized::quantize::<Self>(rows)
    }

    /// Divides float rows by `scales`, and packs the quotients as words of four e4m3 codes. The number of columns is a
    /// multiple of 4. `scales` has one element per row.
    #[fusion(meta = metadata::of_e4m3_words)]
    fn e4m3_words(rows: FloatTensor<Self>, scales: FloatTensor<Self>) -> IntTensor<Self> {
        reference::quantized::e4m3_words::<Self>(rows, scales)
    }

    /// Dequantizes rows of codes in `format` to `dtype`.
    #[fusion(meta = metadata::of_dequantize)]
    fn dequantize_rows(
        #[extension_type] rows: QuantizedTensors<Self>,
        format: CodeFormat,
        dtype: DType,
    ) -> FloatTensor<Self> {
        reference::quantized::dequantize::<Self>(rows, format, dtype)
    }

    /// Writes new rows of floats to pages, and returns the pages.
    #[fusion(meta = |pages, _rows, _places| pages.clone())]
    fn append_rows(
        pages: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        #[extension_type] places: AppendPlaces<Self>,
    ) -> FloatTensor<Self> {
        reference::pages::append_floats::<Self>(pages, rows, places)
    }

    /// Writes new rows of integers to pages, and returns the pages.
    #[fusion(meta = |pages, _rows, _places| pages.clone())]
    fn append_words(
        pages: IntTensor<Self>,
        rows: IntTensor<Self>,
        #[extension_type] places: AppendPlaces<Self>,
    ) -> IntTensor<Self> {
        reference::pages::append_integers::<Self>(pages, rows, places)
    }
}

/// Dequantizes all keys and values to the query's dtype, and computes the forward over this copy.
fn forward_of_copy<B: AttentionBackend>(
    inputs: QuantizedInputs<B>,
    problem: AttentionProblem,
) -> AttentionOutput<B> {
    let (inputs, problem) = reference::pages::contiguous_quantized::<B>(inputs, &problem);
    let (dtype, format) = (problem.dtype, format_of(&problem));
    forward_of_numbers(inputs, problem, |rows| {
        B::dequantize_rows(rows, format, dtype)
    })
}

/// Returns the format of the keys and values of a problem with quantized rows.
fn format_of(problem: &AttentionProblem) -> CodeFormat {
    problem
        .quantized
        .expect("a call over quantized rows has a format")
}

/// Computes the forward over the keys and values that `dequantize` returns.
fn forward_of_numbers<B: AttentionBackend>(
    inputs: QuantizedInputs<B>,
    problem: AttentionProblem,
    dequantize: impl Fn(QuantizedTensors<B>) -> FloatTensor<B>,
) -> AttentionOutput<B> {
    let problem = AttentionProblem {
        quantized: None,
        ..problem
    };
    B::attention_forward(inputs.read(dequantize), problem)
}

#[cfg(feature = "flex")]
impl AttentionBackend for burn::backend::Flex {}
