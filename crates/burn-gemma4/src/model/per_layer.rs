//! Per-layer embeddings (PLE). The table has one row per token of the vocabulary. A row holds one vector of length
//! `columns` for each layer.

use super::placement::TablePlacement;
use super::soft_tokens::CallMedia;
use super::text_model::Gemma4Model;
use super::tokens::Tokens;
use crate::error::Gemma4Error;
use crate::op::linear::Matrix;
use burn::tensor::{DType, Device, Int, Tensor};

impl Gemma4Model {
    /// Returns where the per-layer embedding table was placed, and why. `None` if the model was not loaded from a
    /// checkpoint or has no table.
    pub fn per_layer_table(&self) -> Option<TablePlacement> {
        self.placement
    }

    /// Copies token ids to the host and checks that every id is in the vocabulary.
    pub(crate) fn read_tokens(&self, ids: Tensor<2, Int>) -> Result<Tokens, Gemma4Error> {
        let data = ids
            .clone()
            .try_into_data()
            .map_err(|error| Gemma4Error::Device(format!("cannot read the tokens: {error}")))?;
        self.config.check_tokens(data.iter::<i64>())?;
        let on_host = data.iter::<i64>().map(|token| token as u32).collect();
        Ok(Tokens {
            ids,
            on_host,
            media: CallMedia::default(),
        })
    }

    /// Returns the tokens' rows of the per-layer embedding table, `[tokens, layers · columns]`, if the table is in host
    /// memory. The tokens must be in the vocabulary.
    pub(crate) fn host_rows(&self, tokens: &[u32], device: &Device) -> Option<Tensor<2>> {
        let table = self.host_table.as_ref()?;
        Some(table.rows(tokens, self.dtype(), device))
    }

    /// Computes the per-layer embeddings, `[rows, layers · columns]`: `(table row + projected token embedding) / √2`.
    /// `project` multiplies by the transpose of a weight. `from_host` holds the result of [`host_rows`](Self::host_rows).
    /// The table rows in the places of `media` are constants without a gradient.
    pub(crate) fn per_layer_embeddings(
        &self,
        tokens: &Tensor<2, Int>,
        from_host: Option<Tensor<2>>,
        media: &CallMedia,
        embedded: &Tensor<2>,
        project: impl FnOnce(Tensor<2>, Matrix) -> Tensor<2>,
    ) -> Option<Tensor<2>> {
        let of_token = media.constant_rows(self.rows_of(tokens, from_host)?);
        let projection = self.per_layer_model_projection.as_ref()?;
        let norm = self.per_layer_projection_norm.as_ref()?;
        let [rows, hidden] = embedded.dims();
        let layers = self.config.num_layers();
        let columns = self.config.hidden_size_per_layer_input;
        let of_token = of_token.reshape([rows, layers, columns]);
        // Multiply in f32, because bf16 cannot represent the constants.
        let of_embedding = projection.rounded(embedded.clone(), |embedded| {
            project(embedded, projection.weight.matrix())
        });
        let of_embedding = of_embedding.reshape([rows, layers, columns]);
        let of_embedding = norm.forward(of_embedding.cast(DType::F32) * (hidden as f64).powf(-0.5));
        let sum = of_embedding + of_token.cast(DType::F32);
        let sum = (sum * std::f64::consts::FRAC_1_SQRT_2).cast(embedded.dtype());
        Some(sum.reshape([rows, layers * columns]))
    }

    /// Looks up the tokens' rows, `[rows, layers · columns]`, and scales them as [`Embedding`](super::layer::Embedding)
    /// does.
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
