//! What the layers begin with, of few rows, by kernels: a launch for the embeddings and the first norm, a product, and a launch for what
//! becomes of it.

use super::{
    Gemma4Model,
    layer::{Embedding, RmsNorm, operators::Stream},
};
use crate::op::{
    embed::{self, NormWeight, OfTokens, PerLayerFactors, TokenRows},
    flat_rows,
    linear::{
        Matrix,
        few_rows::{self, Origin},
    },
};
use burn::tensor::{Int, Tensor};

impl Gemma4Model {
    /// The stream of a few tokens before the first layer, `[rows, hidden]`, and their per-layer embeddings, `[rows, layers · columns]`, where the
    /// model has any. No launch of a graph writes the tokens, `[rows]`. `from_host` are [`host_rows`](Self::host_rows).
    pub(crate) fn first_rows(
        &self,
        tokens: &Tensor<1, Int>,
        from_host: Option<Tensor<2>>,
    ) -> (Stream, Option<Tensor<2>>) {
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
        let embeddings = self.few_per_layer_embeddings(tokens, from_host, &rows);
        (Stream::of((rows, normed)), embeddings)
    }

    /// [`per_layer_embeddings`](Self::per_layer_embeddings), rounded at the same places.
    fn few_per_layer_embeddings(
        &self,
        tokens: &Tensor<1, Int>,
        from_host: Option<Tensor<2>>,
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
        let origin = Origin::of(weight);
        let projected = few_rows::project(embedded.clone(), weight.matrix(), None, origin);
        Some(embed::per_layer(
            projected,
            of_tokens,
            weight_of(norm),
            factors,
        ))
    }
}

/// The tokens' rows of a table that is whole.
fn token_rows(embedding: &Embedding, tokens: &Tensor<1, Int>) -> Option<TokenRows> {
    match embedding.weight.matrix() {
        Matrix::Whole(table) => Some(TokenRows {
            table,
            origin: Origin::of(&embedding.weight),
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
