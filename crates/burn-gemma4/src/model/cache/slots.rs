//! The storage of a layer's keys or values in the cache, in the model's dtype or in int8 with a scale per slot and head.

use super::precision::{CODES, KvPrecision};
use crate::op::columns::{columns, columns_of_words};
#[cfg(feature = "cube")]
use crate::op::in_place::rows::{overwrite_integer_row, overwrite_row};
use attention_cube::quantized::QuantizedRows;
use burn::tensor::{DType, Int, Tensor, kind::Basic};
use std::ops::Range;

/// Keys or values, `[batch, kv_heads, slots, width]`.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "each layer has only two values, and both variants hold tensor handles"
)]
pub(crate) enum Slots {
    Whole(Tensor<4>),
    Q8 {
        /// Packed int8 codes, four per 32-bit word, `[batch, kv_heads, slots, width / 4]`.
        words: Tensor<4, Int>,
        /// The f32 scale of each slot and head, `[batch, kv_heads, slots, 1]`.
        scales: Tensor<4>,
    },
}

impl Slots {
    /// Converts floats to the storage format.
    ///
    /// # Panics
    /// Panics if the storage format is int8 and a row does not fill whole 32-bit words.
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

    /// Returns the dimensions. The last dimension counts unpacked elements, not words of four int8 codes.
    pub fn dims(&self) -> [usize; 4] {
        match self {
            Self::Whole(numbers) => numbers.dims(),
            Self::Q8 { words, .. } => {
                let [batch, heads, slots, words] = words.dims();
                [batch, heads, slots, words * CODES]
            }
        }
    }

    /// Returns the size on the device in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Whole(numbers) => bytes(numbers),
            Self::Q8 { words, scales } => bytes(words) + bytes(scales),
        }
    }

    /// Allocates `slots` uninitialized slots of the same format. The caller must write a slot before reading it.
    pub fn empty(&self, slots: usize) -> Self {
        match self {
            Self::Whole(numbers) => Self::Whole(empty(numbers, slots)),
            Self::Q8 { words, scales } => Self::Q8 {
                words: empty(words, slots),
                scales: empty(scales, slots),
            },
        }
    }

    /// Writes `new` to a range of sequences and slots. The write happens in place if `self` is the only handle to the memory.
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
                panic!("the slots of a cache have one storage format")
            }
        }
    }

    /// Copies `new`, the slots of one sequence, to the first slots of `row`, in place. Every handle to this buffer sees
    /// the new values. `new` must not share memory with this buffer.
    #[cfg(feature = "cube")]
    pub fn overwrite_row(&self, row: usize, new: Self) {
        match (self, new) {
            (Self::Whole(numbers), Self::Whole(new)) => overwrite_row(numbers, row, new),
            (
                Self::Q8 { words, scales },
                Self::Q8 {
                    words: new_words,
                    scales: new_scales,
                },
            ) => {
                overwrite_integer_row(words, row, new_words);
                overwrite_row(scales, row, new_scales);
            }
            (Self::Whole(_), Self::Q8 { .. }) | (Self::Q8 { .. }, Self::Whole(_)) => {
                panic!("the slots of a cache have one storage format")
            }
        }
    }

    /// Selects `count` sequences (`dim` 0) or slots (`dim` 2), beginning at `start`.
    pub fn narrow(&self, dim: usize, start: usize, count: usize) -> Self {
        match self.clone() {
            Self::Whole(numbers) => Self::Whole(numbers.narrow(dim, start, count)),
            Self::Q8 { words, scales } => Self::Q8 {
                words: words.narrow(dim, start, count),
                scales: scales.narrow(dim, start, count),
            },
        }
    }

    /// Selects `count` elements of every slot, beginning at `start`. In int8 both `start` and `count` must be multiples of 4.
    pub fn columns(&self, start: usize, count: usize) -> Self {
        match self.clone() {
            Self::Whole(numbers) => Self::Whole(columns(numbers, start, count)),
            Self::Q8 { words, scales } => Self::Q8 {
                words: columns_of_words(words, &scales, start / CODES, count / CODES),
                scales,
            },
        }
    }

    /// Concatenates buffers along the slots.
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

    /// Returns the keys or values as floats. Int8 codes are dequantized to f32.
    ///
    /// # Panics
    /// Panics if the device does not support attention.
    pub fn numbers(self) -> Tensor<4> {
        match self {
            Self::Whole(numbers) => numbers,
            Self::Q8 { words, scales } => rows(words, scales)
                .dequantize(DType::F32)
                .unwrap_or_else(|error| panic!("{error}")),
        }
    }
}

/// Combines packed int8 codes and scales into the type that attention reads.
///
/// # Panics
/// Panics if the shapes of codes and scales do not match.
pub(crate) fn rows(words: Tensor<4, Int>, scales: Tensor<4>) -> QuantizedRows {
    QuantizedRows::of_parts(words, scales.squeeze_dim(3)).unwrap_or_else(|error| panic!("{error}"))
}

fn bytes<K: Basic>(tensor: &Tensor<4, K>) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}

fn empty<K: Basic>(like: &Tensor<4, K>, slots: usize) -> Tensor<4, K> {
    let [batch, heads, _, columns] = like.dims();
    // Allocate a flat tensor, because CUDA's allocator would pad the rows, for example from 1,280 to 1,536 bytes.
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
