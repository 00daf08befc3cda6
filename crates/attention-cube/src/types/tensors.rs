//! The tensors of a call, the tensors that a forward saves for the backward, and the gradients, for any backend.

use crate::options::AttentionOptions;
use crate::problem::AttentionProblem;
use burn::backend::{
    Backend, Dispatch, ExtensionType,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, Int, Tensor};

/// Declares an optional tensor type for Burn's dispatch, which does not support `Option`.
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

/// The input tensors of one attention call, with the shapes of [`AttentionProblem`].
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionInputs<B: Backend> {
    pub query: FloatTensor<B>,
    pub key: FloatTensor<B>,
    pub value: FloatTensor<B>,
    /// The page table, `[batch, pages of a sequence]`. Entry `n` of a sequence is the index of the page that holds its keys from
    /// `n · page_len` on. If it is present, the first dimension of keys and values counts pages, and the third their keys.
    #[extension_type]
    pub page_table: MaybeInt<B>,
    #[extension_type]
    pub mask: MaybeBool<B>,
    #[extension_type]
    pub bias: MaybeFloat<B>,
    #[extension_type]
    pub kv_lengths: MaybeInt<B>,
    #[extension_type]
    pub query_lengths: MaybeInt<B>,
    #[extension_type]
    pub query_segments: MaybeInt<B>,
    #[extension_type]
    pub key_segments: MaybeInt<B>,
    /// First key and end of each interval, `[batch, q_len, 2 · intervals]`.
    #[extension_type]
    pub intervals: MaybeInt<B>,
    #[extension_type]
    pub sinks: MaybeFloat<B>,
}

impl<B: Backend> Clone for AttentionInputs<B> {
    fn clone(&self) -> Self {
        Self {
            query: self.query.clone(),
            key: self.key.clone(),
            value: self.value.clone(),
            page_table: self.page_table.clone(),
            mask: self.mask.clone(),
            bias: self.bias.clone(),
            kv_lengths: self.kv_lengths.clone(),
            query_lengths: self.query_lengths.clone(),
            query_segments: self.query_segments.clone(),
            key_segments: self.key_segments.clone(),
            intervals: self.intervals.clone(),
            sinks: self.sinks.clone(),
        }
    }
}

/// Int8 rows: words of four packed codes, `[batch, kv_heads, kv_len, columns / 4]`, and f32 scales, `[batch, kv_heads,
/// kv_len]`.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct QuantizedTensors<B: Backend> {
    pub words: IntTensor<B>,
    pub scales: FloatTensor<B>,
}

/// The input tensors of one attention call over int8 keys and values.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct QuantizedInputs<B: Backend> {
    pub query: FloatTensor<B>,
    #[extension_type]
    pub key: QuantizedTensors<B>,
    #[extension_type]
    pub value: QuantizedTensors<B>,
    /// The page table, `[batch, pages of a sequence]`. Entry `n` of a sequence is the index of the page that holds its keys from
    /// `n · page_len` on. If it is present, the first dimension of keys and values counts pages, and the third their keys.
    #[extension_type]
    pub page_table: MaybeInt<B>,
    #[extension_type]
    pub mask: MaybeBool<B>,
    #[extension_type]
    pub bias: MaybeFloat<B>,
    #[extension_type]
    pub kv_lengths: MaybeInt<B>,
    #[extension_type]
    pub query_lengths: MaybeInt<B>,
    #[extension_type]
    pub query_segments: MaybeInt<B>,
    #[extension_type]
    pub key_segments: MaybeInt<B>,
    /// First key and end of each interval, `[batch, q_len, 2 · intervals]`.
    #[extension_type]
    pub intervals: MaybeInt<B>,
    #[extension_type]
    pub sinks: MaybeFloat<B>,
}

/// The places of new rows in pages.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AppendPlaces<B: Backend> {
    /// The page table, `[batch, pages of a sequence]`.
    pub page_table: IntTensor<B>,
    /// The position of the first new row of each sequence, `[batch]`.
    pub starts: IntTensor<B>,
    /// The number of new rows of each sequence, `[batch]`. Without it, all rows are new.
    #[extension_type]
    pub counts: MaybeInt<B>,
}

impl<B: Backend> QuantizedInputs<B> {
    /// Converts keys and values by the function `rows`, and returns the inputs of an unquantized call.
    pub(crate) fn read(
        self,
        rows: impl Fn(QuantizedTensors<B>) -> FloatTensor<B>,
    ) -> AttentionInputs<B> {
        AttentionInputs {
            query: self.query,
            key: rows(self.key),
            value: rows(self.value),
            page_table: self.page_table,
            mask: self.mask,
            bias: self.bias,
            kv_lengths: self.kv_lengths,
            query_lengths: self.query_lengths,
            query_segments: self.query_segments,
            key_segments: self.key_segments,
            intervals: self.intervals,
            sinks: self.sinks,
        }
    }
}

/// The output in the query's dtype, and the logsumexp (LSE) of each query's scores in f32 (in f64 for f64 inputs).
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionOutput<B: Backend> {
    pub output: FloatTensor<B>,
    /// The two parts of the LSE, `[2 · batch, q_heads, q_len]`. The first part is a reference score of each query. The second
    /// part is the natural logarithm of the query's softmax sum relative to that reference. The sum of both parts is the LSE.
    /// One f32 would lose the logarithm beside a large reference, but gradients need both.
    pub logsumexp: FloatTensor<B>,
}

/// The tensors that a backward pass needs in addition to the inputs.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionSaved<B: Backend> {
    pub output: FloatTensor<B>,
    pub logsumexp: FloatTensor<B>,
    pub output_gradient: FloatTensor<B>,
    /// The gradient of the logsumexp, in the shape of `logsumexp`. The backward reads only the first half of the first
    /// dimension, which belongs to the reference scores.
    #[extension_type]
    pub logsumexp_gradient: MaybeFloat<B>,
}

/// The gradients, in the shapes and dtypes of the inputs. A gradient is present if the request wants it and the input exists.
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

/// Returns the dtype of a problem's logsumexp.
pub fn logsumexp_dtype(problem: &AttentionProblem) -> DType {
    match problem.dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Joins the intervals of a call into one tensor, `[batch, q_len, 2 · intervals]`: first key and end of each interval.
pub(crate) fn intervals(options: &AttentionOptions) -> MaybeInt<Dispatch> {
    let ends = options.intervals.iter();
    let ends: Vec<Tensor<2, Int>> = ends
        .flat_map(|(start, end)| [start.clone(), end.clone()])
        .collect();
    let joined = (!ends.is_empty()).then(|| Tensor::stack::<3>(ends, 2).into_dispatch());
    joined.into()
}

/// Converts the tensors of a call to the types of Burn's dispatch.
pub(crate) fn inputs(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> AttentionInputs<Dispatch> {
    let intervals = intervals(&options);
    let (query_segments, key_segments) = options.segments.unzip();
    AttentionInputs {
        query: query.into_dispatch(),
        key: key.into_dispatch(),
        value: value.into_dispatch(),
        page_table: MaybeInt::Absent,
        mask: options.mask.map(Tensor::into_dispatch).into(),
        bias: options.bias.map(Tensor::into_dispatch).into(),
        kv_lengths: options.kv_lengths.map(Tensor::into_dispatch).into(),
        query_lengths: options.query_lengths.map(Tensor::into_dispatch).into(),
        query_segments: query_segments.map(Tensor::into_dispatch).into(),
        key_segments: key_segments.map(Tensor::into_dispatch).into(),
        intervals,
        sinks: options.sinks.map(Tensor::into_dispatch).into(),
    }
}
