//! Plugging into Burn: one extension trait with a forward and a backward, which every backend that
//! Burn dispatches to implements.
//!
//! | backend | what runs |
//! |---|---|
//! | CubeCL devices | the kernel that [`select`](crate::select) chooses (`cube.rs`), under Burn's fusion or not |
//! | flex | the [reference](crate::reference), which is also the trait's default body |
//! | autodiff over any | a node of its own in Burn's graph (`autodiff.rs`) |

mod autodiff;
#[cfg(feature = "cube")]
mod cube;

use crate::select::BackwardRequest;
use crate::{AttentionError, AttentionProblem, reference};
use burn::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, Device};

/// Declares the `Option` of a tensor that can cross into Burn's dispatch, which does not know `Option`.
macro_rules! maybe {
    ($name:ident, $tensor:ident) => {
        #[derive(ExtensionType, Debug)]
        #[extension_type(fusion)]
        pub enum $name<B: Backend> {
            Absent,
            Present($tensor<B>),
        }

        impl<B: Backend> Clone for $name<B> {
            fn clone(&self) -> Self {
                match self {
                    Self::Absent => Self::Absent,
                    Self::Present(tensor) => Self::Present(tensor.clone()),
                }
            }
        }

        impl<B: Backend> From<Option<$tensor<B>>> for $name<B> {
            fn from(tensor: Option<$tensor<B>>) -> Self {
                tensor.map_or(Self::Absent, Self::Present)
            }
        }

        impl<B: Backend> $name<B> {
            pub fn as_option(&self) -> Option<&$tensor<B>> {
                match self {
                    Self::Absent => None,
                    Self::Present(tensor) => Some(tensor),
                }
            }

            pub fn into_option(self) -> Option<$tensor<B>> {
                match self {
                    Self::Absent => None,
                    Self::Present(tensor) => Some(tensor),
                }
            }
        }
    };
}

maybe!(MaybeFloat, FloatTensor);
maybe!(MaybeBool, BoolTensor);
maybe!(MaybeInt, IntTensor);

/// The tensors of one attention.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionInputs<B: Backend> {
    pub query: FloatTensor<B>,
    pub key: FloatTensor<B>,
    pub value: FloatTensor<B>,
    #[extension_type]
    pub mask: MaybeBool<B>,
    #[extension_type]
    pub bias: MaybeFloat<B>,
    #[extension_type]
    pub kv_lengths: MaybeInt<B>,
    #[extension_type]
    pub query_segments: MaybeInt<B>,
    #[extension_type]
    pub key_segments: MaybeInt<B>,
    #[extension_type]
    pub sinks: MaybeFloat<B>,
}

impl<B: Backend> Clone for AttentionInputs<B> {
    fn clone(&self) -> Self {
        Self {
            query: self.query.clone(),
            key: self.key.clone(),
            value: self.value.clone(),
            mask: self.mask.clone(),
            bias: self.bias.clone(),
            kv_lengths: self.kv_lengths.clone(),
            query_segments: self.query_segments.clone(),
            key_segments: self.key_segments.clone(),
            sinks: self.sinks.clone(),
        }
    }
}

/// Rows of int8, four a word, and their scales.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct QuantizedTensors<B: Backend> {
    pub words: IntTensor<B>,
    pub scales: FloatTensor<B>,
}

/// The tensors of one attention over quantized keys and values.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct QuantizedInputs<B: Backend> {
    pub query: FloatTensor<B>,
    #[extension_type]
    pub key: QuantizedTensors<B>,
    #[extension_type]
    pub value: QuantizedTensors<B>,
    #[extension_type]
    pub mask: MaybeBool<B>,
    #[extension_type]
    pub bias: MaybeFloat<B>,
    #[extension_type]
    pub kv_lengths: MaybeInt<B>,
    #[extension_type]
    pub query_segments: MaybeInt<B>,
    #[extension_type]
    pub key_segments: MaybeInt<B>,
    #[extension_type]
    pub sinks: MaybeFloat<B>,
}

impl<B: Backend> QuantizedInputs<B> {
    /// With keys and values as `rows` reads them.
    fn read(self, rows: impl Fn(QuantizedTensors<B>) -> FloatTensor<B>) -> AttentionInputs<B> {
        AttentionInputs {
            query: self.query,
            key: rows(self.key),
            value: rows(self.value),
            mask: self.mask,
            bias: self.bias,
            kv_lengths: self.kv_lengths,
            query_segments: self.query_segments,
            key_segments: self.key_segments,
            sinks: self.sinks,
        }
    }
}

/// The output, in the query's dtype, and the logsumexp of every query's scores, in f32 (f64 for f64).
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionOutput<B: Backend> {
    pub output: FloatTensor<B>,
    /// `[2 · batch, q_heads, q_len]`: a reference and, in the second half, the logarithm of the sum by it; together they are the
    /// logsumexp. Where scores are large, one f32 would not keep what the gradients need of both.
    pub logsumexp: FloatTensor<B>,
}

/// What the backward needs beyond the inputs.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionSaved<B: Backend> {
    pub output: FloatTensor<B>,
    pub logsumexp: FloatTensor<B>,
    pub output_gradient: FloatTensor<B>,
    /// Like the logsumexp; what counts is that of the first half.
    #[extension_type]
    pub logsumexp_gradient: MaybeFloat<B>,
}

/// Gradients in the shapes and dtypes of the inputs; present where the input is and [`BackwardRequest`] asks for its.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionGradients<B: Backend> {
    #[extension_type]
    pub query: MaybeFloat<B>,
    #[extension_type]
    pub key: MaybeFloat<B>,
    #[extension_type]
    pub value: MaybeFloat<B>,
    #[extension_type]
    pub bias: MaybeFloat<B>,
    #[extension_type]
    pub sinks: MaybeFloat<B>,
}

/// The devices that this build has an implementation for.
const SERVED: &str = match (cfg!(feature = "cube"), cfg!(feature = "flex")) {
    (true, true) => "CubeCL's devices and Flex",
    (true, false) => "CubeCL's devices",
    (false, true) => "Flex",
    (false, false) => "none without a feature that names some",
};

/// Whether attention runs on the device: Burn's dispatch panics on backends that the extension does not name.
pub(crate) fn check_backend(device: &Device) -> Result<(), AttentionError> {
    let device = device.clone().without_autodiff();
    match device.as_dispatch() {
        #[cfg(feature = "cube")]
        burn::backend::DispatchDevice::Cube(_) => Ok(()),
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => Ok(()),
        #[allow(
            unreachable_patterns,
            reason = "without other backends there are no other devices"
        )]
        other => Err(AttentionError::Backend {
            device: format!("{other:?}"),
            served: SERVED,
        }),
    }
}

/// The dtype of the logsumexp.
pub fn logsumexp_dtype(problem: &AttentionProblem) -> DType {
    match problem.dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// What Burn's fusion must know of the results before they exist.
#[cfg(feature = "cube")]
mod metadata {
    use super::*;
    use crate::quantized::CODES;
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

    pub fn of_dequantize(rows: &QuantizedTensorsMetadata, dtype: &DType) -> TensorSpec {
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
        }
    }
}

/// Fused attention as an operator of a backend.
#[backend_extension(
    Cube: cfg(feature = "cube"),
    Flex: cfg(feature = "flex"),
    Autodiff,
    Fusion: cfg(feature = "cube")
)]
pub trait AttentionBackend: Backend {
    /// The output and the logsumexp of a validated problem.
    #[fusion(meta = metadata::of_forward)]
    fn attention_forward(
        #[extension_type] inputs: AttentionInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        reference::forward_in_parts::<Self>(inputs, &problem)
    }

    /// The gradients of a validated problem.
    #[fusion(meta = metadata::of_backward)]
    fn attention_backward(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] saved: AttentionSaved<Self>,
        problem: AttentionProblem,
        request: BackwardRequest,
    ) -> AttentionGradients<Self> {
        reference::gradients::backward::<Self>(inputs, saved, &problem, request)
    }

    /// The output and the logsumexp of a validated problem over quantized keys and values.
    #[fusion(meta = metadata::of_quantized_forward)]
    fn quantized_attention_forward(
        #[extension_type] inputs: QuantizedInputs<Self>,
        problem: AttentionProblem,
    ) -> AttentionOutput<Self> {
        forward_of_copy::<Self>(inputs, problem)
    }

    /// Rows of floats, whose columns fill words, in int8.
    #[fusion(meta = metadata::of_quantize)]
    fn quantize_rows(rows: FloatTensor<Self>) -> QuantizedTensors<Self> {
        reference::quantized::quantize::<Self>(rows)
    }

    /// What rows of int8 stand for.
    #[fusion(meta = metadata::of_dequantize)]
    fn dequantize_rows(
        #[extension_type] rows: QuantizedTensors<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        reference::quantized::dequantize::<Self>(rows, dtype)
    }
}

/// The output and the logsumexp over a copy of all keys and values in the query's dtype.
fn forward_of_copy<B: AttentionBackend>(
    inputs: QuantizedInputs<B>,
    problem: AttentionProblem,
) -> AttentionOutput<B> {
    let dtype = problem.dtype;
    forward_of_numbers(inputs, problem, |rows| B::dequantize_rows(rows, dtype))
}

/// The output and the logsumexp over the numbers that `dequantize` makes of keys and values.
fn forward_of_numbers<B: AttentionBackend>(
    inputs: QuantizedInputs<B>,
    problem: AttentionProblem,
    dequantize: impl Fn(QuantizedTensors<B>) -> FloatTensor<B>,
) -> AttentionOutput<B> {
    let problem = AttentionProblem {
        quantized: false,
        ..problem
    };
    B::attention_forward(inputs.read(dequantize), problem)
}

#[cfg(feature = "flex")]
impl AttentionBackend for burn::backend::Flex {}
