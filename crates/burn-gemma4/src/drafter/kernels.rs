//! A drafter's steps by kernels alone, whatever computes its layers: nothing waits for the host, and nothing is copied.

use super::{Drafter, Guesses, head};
use crate::{
    Gemma4Model,
    model::{
        cache::key_values::SharedKeyValues,
        layer::operators::{Columns, Operators},
    },
    op::{
        self, flat_rows,
        guess::{self, Embeddings, NUMBERS, TokensAt},
        linear::Matrix,
    },
};
use burn::tensor::{Int, Tensor};

impl Drafter {
    /// Whether kernels serve steps from these streams.
    pub(super) fn has_kernels(&self, hidden: &Tensor<2>) -> bool {
        let table = self.model.head();
        let head = self.masked_embedding.as_ref();
        op::serve(hidden) && head.is_none_or(|head| head.has_kernels(&table))
    }

    /// [`steps`](Self::steps) where there are kernels.
    pub(super) fn steps_by_kernels(
        &self,
        target: &Gemma4Model,
        token: Tensor<1, Int>,
        hidden: Tensor<2>,
        shared: &mut SharedKeyValues,
        operators: &mut impl Operators,
        count: usize,
    ) -> Guesses {
        let (device, [batch]) = (hidden.device(), token.dims());
        let mut stream = Columns::all(hidden);
        let mut read = TokensAt {
            tokens: token,
            first: 0,
        };
        let mut tokens = Tensor::empty([count * batch], (&device, NUMBERS));
        let mut streams = Vec::new();
        for first in (0..count).map(|step| step * batch) {
            let embeddings = embeddings(target, &read, batch);
            let both = guess::join(embeddings, read, stream);
            let normed = self.layers(both, shared, operators);
            let scores;
            (stream, scores) = self.project(normed.clone(), operators);
            let places = TokensAt { tokens, first };
            let head = self.masked_embedding.as_ref().zip(scores);
            tokens = match (head, self.model.head()) {
                (Some((head, scores)), Matrix::Whole(table)) => {
                    head.guess(normed, scores, table, places)
                }
                (_, table) => guess::guess_of_logits(head::logits(normed, table), places),
            };
            read = TokensAt {
                tokens: tokens.clone(),
                first,
            };
            streams.push(stream.clone());
        }
        Guesses { tokens, streams }
    }
}

/// The embeddings of the tokens that are read, of which there are `count`.
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
