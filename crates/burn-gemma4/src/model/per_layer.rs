//! Per-layer embeddings: of each token a row for all layers, from a table that may be too large for the device.

use super::{
    Gemma4Model,
    layer::{Weight, weight::AnyWeight},
};
use crate::{Gemma4Error, checkpoint::placement::TablePlacement, op::linear::Matrix};
use burn::{
    module::Module,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

/// The tokens of a call where they are needed: on the device, and on the host for a table that is there.
#[derive(Clone)]
pub(crate) struct Tokens {
    /// `[batch, positions]`.
    pub ids: Tensor<2, Int>,
    /// The same, sequence after sequence.
    pub on_host: Vec<u32>,
}

impl Tokens {
    /// Tokens that are known to be in the vocabulary.
    pub fn upload(on_host: Vec<u32>, shape: [usize; 2], device: &Device) -> Self {
        let ids: Vec<i32> = on_host.iter().map(|token| *token as i32).collect();
        Self {
            ids: Tensor::from_data(TensorData::new(ids, shape), device),
            on_host,
        }
    }
}

/// A table that no buffer of the device holds, by parts of its rows.
#[derive(Module, Debug)]
pub(crate) struct SplitTable {
    /// `[tokens of a part, columns]`, one after the other.
    pub parts: Vec<Weight>,
    /// Tokens of every part but the last.
    #[module(skip)]
    of_part: usize,
}

impl SplitTable {
    pub fn new(parts: Vec<Weight>, of_part: usize) -> Self {
        Self { parts, of_part }
    }

    /// `[tokens, columns]`. Nothing here depends on the host.
    fn rows(&self, tokens: &Tensor<1, Int>) -> Tensor<2> {
        let of_part = |(index, part): (usize, &Weight)| {
            let matrix = part.matrix();
            let inside = tokens.clone() - (index * self.of_part) as i64;
            let nearest = inside.clone().clamp(0, matrix.rows() as i64 - 1);
            (inside, matrix.select(nearest).whole(part.dtype()))
        };
        let mut parts = self.parts.iter().enumerate().map(of_part);
        let (_, first) = parts.next().expect("a part");
        parts.fold(first, |earlier, (inside, rows)| {
            let is_earlier = inside.lower_elem(0).unsqueeze_dim::<2>(1);
            let is_earlier = is_earlier.expand(rows.dims());
            rows.mask_where(is_earlier, earlier)
        })
    }

    /// The whole table's bytes in `dtype`, little-endian.
    pub fn whole(&self, dtype: DType) -> Vec<u8> {
        let mut bytes = Vec::new();
        for part in &self.parts {
            bytes.extend_from_slice(&match part.quantized() {
                Some(numbers) => numbers.bytes(dtype),
                None => part
                    .val()
                    .into_data()
                    .convert_dtype(dtype)
                    .into_bytes()
                    .to_vec(),
            });
        }
        bytes
    }
}

impl Gemma4Model {
    /// Where the table of per-layer embeddings is that was loaded, and why; nothing where the model has none, or was not loaded.
    pub fn per_layer_table(&self) -> Option<TablePlacement> {
        self.placement
    }

    /// Refuses tokens outside the vocabulary, and reads them back for that.
    pub(crate) fn read_tokens(&self, ids: Tensor<2, Int>) -> Result<Tokens, Gemma4Error> {
        let data = ids.clone().try_into_data().map_err(|error| {
            Gemma4Error::Device(format!("the tokens could not be read: {error}"))
        })?;
        self.config.check_tokens(data.iter::<i64>())?;
        let on_host = data.iter::<i64>().map(|token| token as u32).collect();
        Ok(Tokens { ids, on_host })
    }

    /// `[tokens, layers · columns]`: the table's rows of tokens in the vocabulary, where the table is on the host; nothing where it is not.
    pub(crate) fn host_rows(&self, tokens: &[u32], device: &Device) -> Option<Tensor<2>> {
        let table = self.host_table.as_ref()?;
        Some(table.rows(tokens, self.dtype(), device))
    }

    /// `[rows, layers · columns]`: the per-layer embeddings, half from the token, half from the embedding, by `project` times
    /// the transpose of a weight. `from_host` are [`host_rows`](Self::host_rows).
    pub(crate) fn per_layer_embeddings(
        &self,
        tokens: &Tensor<2, Int>,
        from_host: Option<Tensor<2>>,
        embedded: &Tensor<2>,
        project: impl FnOnce(Tensor<2>, Matrix) -> Tensor<2>,
    ) -> Option<Tensor<2>> {
        let of_token = self.rows_of(tokens, from_host)?;
        let projection = self.per_layer_model_projection.as_ref()?;
        let norm = self.per_layer_projection_norm.as_ref()?;
        let [rows, hidden] = embedded.dims();
        let layers = self.config.num_layers();
        let columns = self.config.hidden_size_per_layer_input;
        let of_token = of_token.reshape([rows, layers, columns]);
        // Constants that bf16 does not hold are applied in f32. `first_rows` has the same in a launch.
        let of_embedding = project(embedded.clone(), projection.weight.matrix());
        let of_embedding = of_embedding.reshape([rows, layers, columns]);
        let of_embedding = norm.forward(of_embedding.cast(DType::F32) * (hidden as f64).powf(-0.5));
        let sum = of_embedding + of_token.cast(DType::F32);
        let sum = (sum * std::f64::consts::FRAC_1_SQRT_2).cast(embedded.dtype());
        Some(sum.reshape([rows, layers * columns]))
    }

    /// `[rows, layers · columns]`: what the table has of tokens, wherever it is, scaled as [`Embedding`](super::layer::Embedding) does.
    pub(crate) fn rows_of(
        &self,
        tokens: &Tensor<2, Int>,
        from_host: Option<Tensor<2>>,
    ) -> Option<Tensor<2>> {
        let scale = (self.config.hidden_size_per_layer_input as f64).sqrt();
        if let Some(rows) = from_host {
            return Some(rows * scale);
        }
        let [batch, positions] = tokens.dims();
        if let Some(table) = &self.split_table {
            let rows = table.rows(&tokens.clone().reshape([batch * positions]));
            return Some(rows * scale);
        }
        let table = self.embed_tokens_per_layer.as_ref()?;
        Some(crate::op::flat_rows(table.forward(tokens.clone())))
    }
}
