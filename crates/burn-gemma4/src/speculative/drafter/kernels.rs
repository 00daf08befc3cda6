//! Drafting steps on device kernels. A step proposes one draft token per sequence, without waiting for the host and
//! without copying a tensor.

use super::{Draft, Drafter, head};
use crate::model::Gemma4Model;
use crate::model::cache::key_values::SharedKeyValues;
use crate::model::layer::ops::LayerOps;
use crate::op;
use crate::op::column_slice::ColumnSlice;
use crate::op::drafter_head::{Embeddings, NUMBERS, TokensAt};
use crate::op::linear::Matrix;
use crate::op::{drafter_head, flat_rows};
use burn::tensor::{Int, Tensor};

impl Drafter {
    /// True if the kernels support this drafter and the dtype and device of the hidden states `hidden`.
    pub(super) fn has_kernels(&self, hidden: &Tensor<2>) -> bool {
        let table = self.model.head();
        let head = self.masked_embedding.as_ref();
        op::serve(hidden) && head.is_none_or(|head| head.has_kernels(&table))
    }

    /// Runs the drafting steps of [`steps`](Self::steps) with kernels.
    pub(super) fn steps_by_kernels(
        &self,
        target: &Gemma4Model,
        token: Tensor<1, Int>,
        hidden: Tensor<2>,
        shared: &mut SharedKeyValues,
        operators: &mut impl LayerOps,
        count: usize,
    ) -> Draft {
        let (device, [batch]) = (hidden.device(), token.dims());
        let mut stream = ColumnSlice::all(hidden);
        let mut read = TokensAt {
            tokens: token,
            first: 0,
        };
        let mut tokens = Tensor::empty([count * batch], (&device, NUMBERS));
        let mut streams = Vec::new();
        for first in (0..count).map(|step| step * batch) {
            let embeddings = embeddings(target, &read, batch);
            let both = drafter_head::join(embeddings, read, stream);
            let normed = self.layers(both, shared, operators);
            let scores;
            (stream, scores) = self.project(normed.clone(), operators);
            let places = TokensAt { tokens, first };
            let head = self.masked_embedding.as_ref().zip(scores);
            tokens = match (head, self.model.head()) {
                (Some((head, scores)), Matrix::Whole(table)) => {
                    head.guess(normed, scores, table, places)
                }
                (_, table) => drafter_head::guess_of_logits(head::logits(normed, table), places),
            };
            read = TokensAt {
                tokens: tokens.clone(),
                first,
            };
            streams.push(stream.clone());
        }
        Draft { tokens, streams }
    }
}

/// Describes where a drafting step finds the embeddings of its `count` input tokens.
fn embeddings(target: &Gemma4Model, read: &TokensAt, count: usize) -> Embeddings {
    let embedding = &target.embed_tokens;
    match embedding.weight.matrix() {
        Matrix::Whole(table) => Embeddings::Table {
            table,
            scale: embedding.scale(),
        },
        Matrix::Quantized(_) => {
            let tokens = read.tokens.clone().narrow(0, read.first, count);
            Embeddings::Rows(flat_rows(embedding.forward(tokens.unsqueeze::<2>())))
        }
    }
}
