//! The tokens of a call.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// The tokens of a call, on the device and on the host. A per-layer embedding table in host memory needs the tokens on
/// the host.
#[derive(Clone)]
pub(crate) struct Tokens {
    /// The token ids, `[batch, positions]`.
    pub ids: Tensor<2, Int>,
    /// The token ids on the host, sequence by sequence.
    pub on_host: Vec<u32>,
}

impl Tokens {
    /// Uploads token ids. Every id must be in the vocabulary.
    pub fn upload(on_host: Vec<u32>, shape: [usize; 2], device: &Device) -> Self {
        let ids: Vec<i32> = on_host.iter().map(|token| *token as i32).collect();
        Self {
            ids: Tensor::from_data(TensorData::new(ids, shape), device),
            on_host,
        }
    }
}
