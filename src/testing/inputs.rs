//! The data of a case, on the host and on a device.

use super::dense::Dense;
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

/// The data of a case on the host, in f64 but of values that its dtype holds.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub query: Dense,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub key: Dense,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub value: Dense,
    /// What the loss multiplies the output with.
    pub output_gradient: Dense,
    /// What the loss multiplies the logsumexp with, `[batch, q_heads, q_len, 1]`.
    pub lse_gradient: Option<Dense>,
    /// Broadcastable to the scores.
    pub bias: Option<Dense>,
    /// `[1, q_heads, 1, 1]`, or of one head if expanded.
    pub sinks: Option<Dense>,
    /// 1 is visible.
    pub mask: Option<Dense>,
    /// How many keys of each sequence exist.
    pub kv_lengths: Option<Vec<i64>>,
    /// Ids of the queries and of the keys, sequence after sequence.
    pub segments: Option<(Vec<i64>, Vec<i64>)>,
}

/// The optional tensors of a call on a device.
#[derive(Clone)]
pub struct Extras {
    /// See [`AttentionOptions::mask`](attention_cube::AttentionOptions::mask).
    pub mask: Option<Tensor<4, Bool>>,
    /// A leaf.
    pub bias: Option<Tensor<4>>,
    /// `[batch]`.
    pub kv_lengths: Option<Tensor<1, Int>>,
    /// Of queries and keys, `[batch, length]`.
    pub segments: Option<(Tensor<2, Int>, Tensor<2, Int>)>,
    /// `[q_heads]`, or of one head if expanded; a leaf.
    pub sinks: Option<Tensor<1>>,
}

impl Inputs {
    /// On a device with autodiff: bias and sinks are leaves.
    pub fn extras(&self, device: &Device, dtype: DType) -> Extras {
        let ids = |ids: &Vec<i64>, length: usize| {
            let shape = [ids.len() / length, length];
            Tensor::<2, Int>::from_data(TensorData::new(ids.clone(), shape), device)
        };
        Extras {
            mask: self.mask.as_ref().map(|mask| {
                let values: Vec<bool> = mask.values.iter().map(|value| *value != 0.0).collect();
                Tensor::from_data(TensorData::new(values, mask.shape), device)
            }),
            bias: self
                .bias
                .as_ref()
                .map(|bias| bias.tensor(device, dtype).require_grad()),
            kv_lengths: self
                .kv_lengths
                .as_ref()
                .map(|lengths| length_tensor(lengths, device)),
            segments: self.segments.as_ref().map(|(queries, keys)| {
                (
                    ids(queries, self.query.shape[2]),
                    ids(keys, self.key.shape[2]),
                )
            }),
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

/// In the device's own integers where these hold the lengths, else in 64 bits where it has those.
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
