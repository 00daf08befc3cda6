//! The embeddings of a decode step in three launches: token embeddings with the first norm, the GEMV of the per-layer
//! projection, and the per-layer embeddings.

use super::Gemma4Model;
use super::adapters::PassAdapters;
use super::decode_ops::project_by_adapter;
use super::layer::ops::ResidualStream;
use super::layer::{Embedding, RmsNorm};
use crate::op::embed::{NormWeight, OfTokens, PerLayerFactors, TokenRows};
use crate::op::linear::Matrix;
use crate::op::{embed, flat_rows, gemv};
use burn::tensor::{Int, Tensor};

impl Gemma4Model {
    /// Returns the residual stream before the first layer, `[rows, hidden]`, and the per-layer embeddings,
    /// `[rows, layers · columns]`, if the model has them. No launch of a captured graph may write `tokens`, `[rows]`.
    /// `from_host` holds the tokens' rows of the per-layer embedding table, if this table is in host memory: see
    /// [`host_rows`](Self::host_rows). `adapters` are the adapters that the rows select.
    pub(crate) fn first_rows(
        &self,
        tokens: &Tensor<1, Int>,
        from_host: Option<Tensor<2>>,
        adapters: Option<&PassAdapters>,
    ) -> (ResidualStream, Option<Tensor<2>>) {
        let first = self.layers.first();
        let norm = first.map_or(&self.norm, |layer| &layer.input_layernorm);
        let (rows, normed) = match token_rows(&self.embed_tokens, tokens) {
            Some(rows) => {
                let (rows, normed) = embed::embed(rows, weight_of(norm));
                (rows, Some(normed))
            }
            None => {
                let tokens = tokens.clone().unsqueeze_dim(1);
                (flat_rows(self.embed_tokens.forward(tokens)), None)
            }
        };
        let embeddings = self.few_per_layer_embeddings(tokens, from_host, adapters, &rows);
        (ResidualStream::of((rows, normed)), embeddings)
    }

    /// Computes the same values as [`per_layer_embeddings`](Self::per_layer_embeddings), with the same rounding, but
    /// runs kernels that are fast for a few rows.
    fn few_per_layer_embeddings(
        &self,
        tokens: &Tensor<1, Int>,
        from_host: Option<Tensor<2>>,
        adapters: Option<&PassAdapters>,
        embedded: &Tensor<2>,
    ) -> Option<Tensor<2>> {
        let projection = self.per_layer_model_projection.as_ref()?;
        let norm = self.per_layer_projection_norm.as_ref()?;
        let table = self.embed_tokens_per_layer.as_ref();
        let in_table = table.and_then(|table| token_rows(table, tokens));
        let of_tokens = match in_table {
            Some(rows) => OfTokens::from(rows),
            None => {
                let tokens = tokens.clone().unsqueeze_dim(1);
                OfTokens::there(self.rows_of(&tokens, from_host)?)
            }
        };
        let [_, hidden] = embedded.dims();
        let factors = PerLayerFactors {
            projected: (hidden as f64).powf(-0.5),
            sum: std::f64::consts::FRAC_1_SQRT_2,
        };
        let weight = &projection.weight;
        let origin = weight.origin();
        let projected = gemv::project(embedded.clone(), weight.matrix(), None, origin);
        let added =
            adapters.and_then(|adapters| adapters.added(embedded, projection, project_by_adapter));
        let projected = match added {
            Some(added) => projected + added,
            None => projected,
        };
        Some(embed::per_layer(
            projected,
            of_tokens,
            weight_of(norm),
            factors,
        ))
    }
}

/// Describes which rows of an embedding table a kernel must read: the rows of `tokens`. Returns `None` for a quantized
/// table.
fn token_rows(embedding: &Embedding, tokens: &Tensor<1, Int>) -> Option<TokenRows> {
    match embedding.weight.matrix() {
        Matrix::Whole(table) => Some(TokenRows {
            table,
            origin: embedding.weight.origin(),
            tokens: tokens.clone(),
            scale: embedding.scale(),
        }),
        Matrix::Quantized(_) => None,
    }
}

fn weight_of(norm: &RmsNorm) -> NormWeight {
    NormWeight {
        weight: norm.weight.val(),
        epsilon: norm.epsilon(),
    }
}
