//! Keys or values as a cache keeps them: in the model's dtype, or in int8 with a scale a slot and head.

use super::kind::KvPrecision;
use crate::op::columns::{columns, columns_of_words};
use attention_cube::quantized::QuantizedRows;
use burn::tensor::{DType, Int, Tensor, kind::Basic};
use std::ops::Range;

/// `[batch, kv_heads, slots, width]`.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a layer has two, and either kind is handles"
)]
pub(crate) enum Slots {
    Whole(Tensor<4>),
    Q8 {
        /// Of four numbers each.
        words: Tensor<4, Int>,
        /// `[batch, kv_heads, slots, 1]`.
        scales: Tensor<4>,
    },
}

/// Numbers of a word.
pub(crate) const CODES: usize = 4;

impl Slots {
    /// Numbers in this precision.
    ///
    /// # Panics
    /// Where rows do not consist of words, which a cache of that precision has made sure of.
    pub fn new(numbers: Tensor<4>, precision: KvPrecision) -> Self {
        match precision {
            KvPrecision::Model => Self::Whole(numbers),
            KvPrecision::Q8 => {
                let (words, scales) = QuantizedRows::new(numbers).into_parts();
                let scales = scales.unsqueeze_dim(3);
                Self::Q8 { words, scales }
            }
        }
    }

    /// Its sizes, in numbers.
    pub fn dims(&self) -> [usize; 4] {
        match self {
            Self::Whole(numbers) => numbers.dims(),
            Self::Q8 { words, .. } => {
                let [batch, heads, slots, words] = words.dims();
                [batch, heads, slots, words * CODES]
            }
        }
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Whole(numbers) => bytes(numbers),
            Self::Q8 { words, scales } => bytes(words) + bytes(scales),
        }
    }

    /// As many `slots` of this kind. What is in them before they are written is never read.
    pub fn empty(&self, slots: usize) -> Self {
        match self {
            Self::Whole(numbers) => Self::Whole(empty(numbers, slots)),
            Self::Q8 { words, scales } => Self::Q8 {
                words: empty(words, slots),
                scales: empty(scales, slots),
            },
        }
    }

    /// Writes `new` over the slots of these sequences, in place where this is the only handle to their memory.
    pub fn assign(self, sequences: Range<usize>, slots: Range<usize>, new: Self) -> Self {
        match (self, new) {
            (Self::Whole(numbers), Self::Whole(new)) => {
                Self::Whole(assign(numbers, sequences, slots, new))
            }
            (
                Self::Q8 { words, scales },
                Self::Q8 {
                    words: new_words,
                    scales: new_scales,
                },
            ) => Self::Q8 {
                words: assign(words, sequences.clone(), slots.clone(), new_words),
                scales: assign(scales, sequences, slots, new_scales),
            },
            (Self::Whole(_), Self::Q8 { .. }) | (Self::Q8 { .. }, Self::Whole(_)) => {
                panic!("a cache is of one precision")
            }
        }
    }

    /// `count` sequences (`dim` 0) or slots (`dim` 2) from `start` on.
    pub fn narrow(&self, dim: usize, start: usize, count: usize) -> Self {
        match self.clone() {
            Self::Whole(numbers) => Self::Whole(numbers.narrow(dim, start, count)),
            Self::Q8 { words, scales } => Self::Q8 {
                words: words.narrow(dim, start, count),
                scales: scales.narrow(dim, start, count),
            },
        }
    }

    /// `count` columns from `start` on, of all slots: whole words.
    pub fn columns(&self, start: usize, count: usize) -> Self {
        match self.clone() {
            Self::Whole(numbers) => Self::Whole(columns(numbers, start, count)),
            Self::Q8 { words, scales } => Self::Q8 {
                words: columns_of_words(words, &scales, start / CODES, count / CODES),
                scales,
            },
        }
    }

    /// Slots side by side.
    pub fn cat(parts: Vec<Self>) -> Self {
        let (mut whole, mut all_words, mut all_scales) = (Vec::new(), Vec::new(), Vec::new());
        for part in parts {
            match part {
                Self::Whole(numbers) => whole.push(numbers),
                Self::Q8 { words, scales } => {
                    all_words.push(words);
                    all_scales.push(scales);
                }
            }
        }
        match all_words.is_empty() {
            true => Self::Whole(Tensor::cat(whole, 2)),
            false => Self::Q8 {
                words: Tensor::cat(all_words, 2),
                scales: Tensor::cat(all_scales, 2),
            },
        }
    }

    /// What they stand for.
    ///
    /// # Panics
    /// Where the device serves no attention, which a model has needed before.
    pub fn numbers(self) -> Tensor<4> {
        match self {
            Self::Whole(numbers) => numbers,
            Self::Q8 { words, scales } => rows(words, scales)
                .dequantize(DType::F32)
                .unwrap_or_else(|error| panic!("{error}")),
        }
    }
}

/// Words and scales as attention reads them.
///
/// # Panics
/// Where they do not fit each other, as those of slots do.
pub(crate) fn rows(words: Tensor<4, Int>, scales: Tensor<4>) -> QuantizedRows {
    QuantizedRows::of_parts(words, scales.squeeze_dim(3)).unwrap_or_else(|error| panic!("{error}"))
}

fn bytes<K: Basic>(tensor: &Tensor<4, K>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

fn empty<K: Basic>(like: &Tensor<4, K>, slots: usize) -> Tensor<4, K> {
    let [batch, heads, _, columns] = like.dims();
    // A slot a row, CUDA's allocator would fill slots of 1,280 bytes up to 1,536.
    let flat = Tensor::<3, K>::empty(
        [batch, heads, slots * columns],
        (&like.device(), like.dtype()),
    );
    flat.reshape([batch, heads, slots, columns])
}

fn assign<K: Basic>(
    buffer: Tensor<4, K>,
    sequences: Range<usize>,
    slots: Range<usize>,
    new: Tensor<4, K>,
) -> Tensor<4, K> {
    let [_, heads, _, columns] = buffer.dims();
    buffer.slice_assign([sequences, 0..heads, slots, 0..columns], new)
}
