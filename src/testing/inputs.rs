//! The input data of a test case, on the host and on a device.

use super::dense::Dense;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

/// The input data of a test case on the host, stored in f64. The case's dtype can represent every element exactly.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// The query, `[batch, q_heads, q_len, head_dim]`.
    pub query: Dense,
    /// The keys, `[batch, kv_heads, kv_len, head_dim]`.
    pub key: Dense,
    /// The values, `[batch, kv_heads, kv_len, value_dim]`.
    pub value: Dense,
    /// The output's weights in the loss, `[batch, q_heads, q_len, value_dim]`. The output's gradient equals these
    /// weights.
    pub output_gradient: Dense,
    /// The logsumexp's weights in the loss, `[batch, q_heads, q_len, 1]`. The logsumexp's gradient equals these
    /// weights.
    pub lse_gradient: Option<Dense>,
    /// The bias, with a shape that broadcasts to the scores `[batch, q_heads, q_len, kv_len]`.
    pub bias: Option<Dense>,
    /// The sinks, `[1, q_heads, 1, 1]`. If the case expands its optional tensors, this array holds a single sink for all
    /// heads, `[1, 1, 1, 1]`.
    pub sinks: Option<Dense>,
    /// The mask, in a shape that broadcasts to the scores. The element 1 means a visible key, and the element 0 means a hidden
    /// key.
    pub mask: Option<Dense>,
    /// The numbers of queries and of keys per element of a block mask. All elements of `mask` in such a block are
    /// equal. `None` if the call gets `mask` as it is.
    pub mask_block: Option<[usize; 2]>,
    /// The number of valid keys per sequence.
    pub kv_lengths: Option<Vec<i64>>,
    /// The number of queries per sequence.
    pub query_lengths: Option<Vec<i64>>,
    /// The segment ids of all queries, and the segment ids of all keys. Each list has the ids of sequence 0 first, then
    /// those of sequence 1, and so on.
    pub segments: Option<(Vec<i64>, Vec<i64>)>,
    /// The interval sets. A set is a pair of lists over `[batch, q_len]`: the first visible key of each query, and the end
    /// (one past the last visible key).
    pub intervals: Vec<(Vec<i64>, Vec<i64>)>,
}

/// The optional tensors of an attention call, on a device.
#[derive(Clone)]
pub struct Extras {
    /// The mask, as in [`AttentionOptions::mask`](attention_cube::AttentionOptions::mask).
    pub mask: Option<Tensor<4, Bool>>,
    /// The numbers of queries and of keys per element of the mask, or `None` for a mask with one element per score.
    pub mask_block: Option<[usize; 2]>,
    /// The bias, which is a leaf of the autodiff graph.
    pub bias: Option<Tensor<4>>,
    /// The number of valid keys of each sequence, `[batch]`.
    pub kv_lengths: Option<Tensor<1, Int>>,
    /// The number of queries of each sequence, `[batch]`.
    pub query_lengths: Option<Tensor<1, Int>>,
    /// The segment ids of queries and keys, `[batch, length]`.
    pub segments: Option<(Tensor<2, Int>, Tensor<2, Int>)>,
    /// The interval sets. A set is a pair of tensors `[batch, q_len]`: the first visible key of each query, and the end (one
    /// past the last visible key).
    pub intervals: Vec<(Tensor<2, Int>, Tensor<2, Int>)>,
    /// The sinks, `[q_heads]`, which are a leaf of the autodiff graph. If the case expands its optional tensors, the leaf
    /// holds a single sink for all heads, `[1]`.
    pub sinks: Option<Tensor<1>>,
    /// The device of the tensors.
    pub device: Device,
}

impl Inputs {
    /// Creates the optional tensors on a device. The bias and the sinks are leaves of the autodiff graph.
    pub fn extras(&self, device: &Device, dtype: DType) -> Extras {
        let ids = |ids: &Vec<i64>, length: usize| {
            let shape = [ids.len() / length, length];
            Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), shape), device)
        };
        Extras {
            device: device.clone(),
            mask: self.mask.as_ref().map(|mask| {
                let [queries, keys] = self.mask_block.unwrap_or([1, 1]);
                let [batch, heads, rows, columns] = mask.shape;
                let shape = [batch, heads, rows.div_ceil(queries), columns.div_ceil(keys)];
                let elements =
                    Dense::from_fn(shape, |[b, h, i, j]| mask.at([b, h, i * queries, j * keys]));
                let values: Vec<bool> = elements.values.iter().map(|value| *value != 0.0).collect();
                Tensor::from_data(TensorData::new(values, shape), device)
            }),
            mask_block: self.mask_block,
            bias: self
                .bias
                .as_ref()
                .map(|bias| bias.tensor(device, dtype).require_grad()),
            kv_lengths: self
                .kv_lengths
                .as_ref()
                .map(|lengths| length_tensor(lengths, device)),
            query_lengths: self
                .query_lengths
                .as_ref()
                .map(|lengths| length_tensor(lengths, device)),
            segments: self.segments.as_ref().map(|(queries, keys)| {
                (
                    ids(queries, self.query.shape[2]),
                    ids(keys, self.key.shape[2]),
                )
            }),
            intervals: (self.intervals.iter())
                .map(|(start, end)| {
                    let q_len = self.query.shape[2];
                    (ids(start, q_len), ids(end, q_len))
                })
                .collect(),
            sinks: self.sinks.as_ref().map(|sinks| {
                sinks
                    .tensor(device, dtype)
                    .reshape([sinks.values.len()])
                    .detach()
                    .require_grad()
            }),
        }
    }
}

impl Inputs {
    /// With a block mask, sets all elements of `mask` in a block to the block's first element.
    pub fn coarsen_mask(&mut self) {
        if let Some(([queries, keys], mask)) = self.mask_block.zip(self.mask.as_mut()) {
            *mask = Dense::from_fn(mask.shape, |[b, h, i, j]| {
                mask.at([b, h, i / queries * queries, j / keys * keys])
            });
        }
    }

    /// Returns the inputs with a mask that has one element per score.
    pub fn with_mask_of_scores(&self) -> Self {
        Self {
            mask_block: None,
            ..self.clone()
        }
    }
}

impl Extras {
    /// Returns the tensors without autodiff.
    pub fn without_autodiff(self) -> Self {
        let plain = |(first, second): (Tensor<2, Int>, Tensor<2, Int>)| {
            (first.without_autodiff(), second.without_autodiff())
        };
        Self {
            device: self.device.without_autodiff(),
            mask: self.mask.map(Tensor::without_autodiff),
            mask_block: self.mask_block,
            bias: self.bias.map(Tensor::without_autodiff),
            kv_lengths: self.kv_lengths.map(Tensor::without_autodiff),
            query_lengths: self.query_lengths.map(Tensor::without_autodiff),
            segments: self.segments.map(plain),
            intervals: self.intervals.into_iter().map(plain).collect(),
            sinks: self.sinks.map(Tensor::without_autodiff),
        }
    }
}

/// Creates a tensor of sequence lengths. If all lengths fit in 32 bits, the tensor has the device's default integer dtype.
/// Longer lengths need 64-bit integers. On a device without 64-bit integers, the function clamps the lengths to 32 bits.
fn length_tensor(lengths: &[i64], device: &Device) -> Tensor<1, Int> {
    let narrow = |length: i64| length.clamp(i32::MIN.into(), i32::MAX.into());
    let fits = lengths.iter().all(|length| narrow(*length) == *length);
    let data = |lengths: Vec<i64>| {
        let count = lengths.len();
        TensorData::new(lengths, [count])
    };
    if !fits && device.supports_dtype(DType::I64) {
        return Tensor::from_data(data(lengths.to_vec()), (device, DType::I64));
    }
    let lengths = lengths.iter().copied().map(narrow).collect();
    Tensor::from_data(data(lengths), device)
}
