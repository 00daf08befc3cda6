//! The input tensors of a call, the tensors that the forward pass saves for the backward pass, and the gradients. The
//! types work with any backend.

use crate::options::AttentionOptions;
use crate::problem::AttentionProblem;
use burn::backend::{
    Backend, Dispatch, ExtensionType,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, Int, Tensor};

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
    /// The page table, `[batch, pages of a sequence]`. Entry `n` is the index of the page with the sequence's keys
    /// `n · page_len` to `(n + 1) · page_len − 1`. With a page table, keys and values are
    /// `[pages, kv_heads, page_len, columns]`.
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
    /// The key intervals of each query, `[batch, q_len, 2 · intervals]`. For each interval, the tensor holds the first
    /// key and the index after the last key.
    #[extension_type]
    pub intervals: MaybeInt<B>,
    #[extension_type]
    pub sinks: MaybeFloat<B>,
    /// The elements that the score mod reads, f32.
    #[extension_type]
    pub score_table: MaybeFloat<B>,
    /// The elements that the mask mod reads, f32.
    #[extension_type]
    pub mask_table: MaybeFloat<B>,
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
            score_table: self.score_table.clone(),
            mask_table: self.mask_table.clone(),
        }
    }
}

/// Quantized rows. Each element of `words`, `[batch, kv_heads, kv_len, columns / 4]`, holds four packed codes.
/// `scales`, `[batch, kv_heads, kv_len]`, holds the f32 scale of each row.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct QuantizedTensors<B: Backend> {
    pub words: IntTensor<B>,
    pub scales: FloatTensor<B>,
}

/// The input tensors of one attention call over quantized keys and values.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct QuantizedInputs<B: Backend> {
    pub query: FloatTensor<B>,
    #[extension_type]
    pub key: QuantizedTensors<B>,
    #[extension_type]
    pub value: QuantizedTensors<B>,
    /// The page table, `[batch, pages of a sequence]`. Entry `n` is the index of the page with the sequence's keys
    /// `n · page_len` to `(n + 1) · page_len − 1`. With a page table, keys and values are
    /// `[pages, kv_heads, page_len, columns]`.
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
    /// The key intervals of each query, `[batch, q_len, 2 · intervals]`. For each interval, the tensor holds the first
    /// key and the index after the last key.
    #[extension_type]
    pub intervals: MaybeInt<B>,
    #[extension_type]
    pub sinks: MaybeFloat<B>,
    /// The elements that the score mod reads, f32.
    #[extension_type]
    pub score_table: MaybeFloat<B>,
    /// The elements that the mask mod reads, f32.
    #[extension_type]
    pub mask_table: MaybeFloat<B>,
}

/// The slots to which an append writes new rows. A slot is the place of one token in a page.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AppendPlaces<B: Backend> {
    /// The page table, `[batch, pages of a sequence]`.
    pub page_table: IntTensor<B>,
    /// The position of the first new row of each sequence, `[batch]`.
    pub starts: IntTensor<B>,
    /// The number of new rows of each sequence, `[batch]`. Without this tensor, an append writes all given rows.
    #[extension_type]
    pub counts: MaybeInt<B>,
}

impl<B: Backend> QuantizedInputs<B> {
    /// Converts keys and values to floats with the function `rows`, and returns the inputs of a call over these floats.
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
            score_table: self.score_table,
            mask_table: self.mask_table,
        }
    }
}

/// The output in the query's dtype, and the logsumexp (LSE) of each query's scores in f32 (in f64 for f64 inputs).
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionOutput<B: Backend> {
    pub output: FloatTensor<B>,
    /// The LSE in two parts, `[2 · batch, q_heads, q_len]`. The first half holds each query's reference score, which
    /// the softmax subtracts from the query's scores. A reference score is near the query's largest score. The second
    /// half holds the logarithms of the softmax sums. The LSE is the sum of the two halves.
    pub logsumexp: FloatTensor<B>,
}

/// The tensors that a backward pass needs in addition to the inputs.
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct AttentionSaved<B: Backend> {
    pub output: FloatTensor<B>,
    pub logsumexp: FloatTensor<B>,
    pub output_gradient: FloatTensor<B>,
    /// The gradient of the logsumexp, in the shape of `logsumexp`. The LSE is the sum of the two halves of `logsumexp`,
    /// so both halves have the same gradient. The backward pass therefore reads only the first half.
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
    /// The gradient of the score mod's table.
    #[extension_type]
    pub table: MaybeFloat<B>,
}

/// Returns the dtype of a problem's logsumexp.
pub fn logsumexp_dtype(problem: &AttentionProblem) -> DType {
    match problem.dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Joins the intervals of a call into one tensor, `[batch, q_len, 2 · intervals]`. For each interval, the tensor holds
/// the first key and the index after the last key.
pub(crate) fn intervals(options: &AttentionOptions) -> MaybeInt<Dispatch> {
    let ends = options.intervals.iter();
    let ends: Vec<Tensor<2, Int>> = ends
        .flat_map(|(start, end)| [start.clone(), end.clone()])
        .collect();
    let joined = (!ends.is_empty()).then(|| Tensor::stack::<3>(ends, 2).into_dispatch());
    joined.into()
}

/// Converts the table of a score mod or mask mod to f32. A table without elements counts as absent.
pub(crate) fn table(table: Option<Tensor<1>>) -> MaybeFloat<Dispatch> {
    let table = table.filter(|table| table.dims() != [0]);
    let table = table.map(|table| table.cast(FloatDType::F32).into_dispatch());
    table.into()
}

/// Converts the tensors of a call to the types of Burn's dispatch.
pub(crate) fn inputs(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> AttentionInputs<Dispatch> {
    let intervals = intervals(&options);
    let mask = options.any_mask().map(|(mask, _)| mask.clone());
    let (query_segments, key_segments) = options.segments.unzip();
    AttentionInputs {
        query: query.into_dispatch(),
        key: key.into_dispatch(),
        value: value.into_dispatch(),
        page_table: MaybeInt::Absent,
        mask: mask.map(Tensor::into_dispatch).into(),
        bias: options.bias.map(Tensor::into_dispatch).into(),
        kv_lengths: options.kv_lengths.map(Tensor::into_dispatch).into(),
        query_lengths: options.query_lengths.map(Tensor::into_dispatch).into(),
        query_segments: query_segments.map(Tensor::into_dispatch).into(),
        key_segments: key_segments.map(Tensor::into_dispatch).into(),
        intervals,
        sinks: options.sinks.map(Tensor::into_dispatch).into(),
        score_table: table(options.score_table),
        mask_table: table(options.mask_table),
    }
}
