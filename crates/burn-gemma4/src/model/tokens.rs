//! The tokens of a call.

use super::soft_tokens::CallMedia;
use burn::tensor::{Device, Int, Tensor, TensorData};

/// The tokens of a call, on the device and on the host. A per-layer embedding table in host memory needs the tokens on
/// the host.
#[derive(Clone)]
pub(crate) struct Tokens {
    /// The token ids, `[batch, positions]`.
    pub ids: Tensor<2, Int>,
    /// The token ids on the host, sequence by sequence.
    pub on_host: Vec<u32>,
    /// The images and audio clips, whose soft tokens stand in the place of some tokens' embeddings.
    pub media: CallMedia,
}

impl Tokens {
    /// Uploads token ids as [`upload`](Self::upload) does, with images and audio clips. The embeddings of the tokens
    /// in their places are those of `pad`, as in Hugging Face Transformers. The per-layer embeddings depend on these
    /// tokens.
    pub fn upload_with_media(
        mut on_host: Vec<u32>,
        shape: [usize; 2],
        media: CallMedia,
        pad: u32,
        device: &Device,
    ) -> Self {
        let [_, columns] = shape;
        for (sequence, place) in media.places() {
            place.for_each(|column| on_host[sequence * columns + column] = pad);
        }
        Self {
            media,
            ..Self::upload(on_host, shape, device)
        }
    }

    /// Uploads token ids. Every id must be in the vocabulary.
    pub fn upload(on_host: Vec<u32>, shape: [usize; 2], device: &Device) -> Self {
        let ids: Vec<i32> = on_host.iter().map(|token| *token as i32).collect();
        Self {
            ids: Tensor::from_data(TensorData::new(ids, shape), device),
            on_host,
            media: CallMedia::default(),
        }
    }
}
