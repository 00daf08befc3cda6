//! What a drafter's steps are made of beside layers: what goes into a step, and the token that comes out of it, as kernels that need no host: for inference
//! on CubeCL devices.
//!
//! A round's guesses are in one tensor, one step's after the other, where the next step finds its tokens and whoever asks for them all.

mod groups;
mod kernel;
mod launch;
#[cfg(test)]
mod tests;

use super::linear::Matrix;
use crate::model::layer::operators::Columns;
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Shape, Tensor},
};

/// The dtype of tokens' numbers.
pub(crate) const NUMBERS: DType = DType::I32;

/// Some tokens of a tensor of [`NUMBERS`], one for each row.
#[derive(Clone)]
pub(crate) struct TokensAt {
    pub tokens: Tensor<1, Int>,
    /// The first of them.
    pub first: usize,
}

/// Where embeddings come from.
pub(crate) enum Embeddings {
    /// From a table, `[tokens, columns]`, times a scale that is rounded to its dtype.
    Table { table: Tensor<2>, scale: f64 },
    /// They are known, `[rows, columns]`.
    Rows(Tensor<2>),
}

/// The embeddings of a token a row, and beside them its stream, of as many columns: `[rows, 2 · columns]`.
pub(crate) fn join(embeddings: Embeddings, tokens: TokensAt, streams: Columns) -> Tensor<2> {
    let (table, scale) = match embeddings {
        Embeddings::Table { table, scale } => (table, Some(scale)),
        Embeddings::Rows(rows) => (rows, None),
    };
    assert_eq!(streams.start, 0, "the stream begins its rows");
    assert_eq!(streams.count, table.dims()[1], "as many columns");
    let options = JoinOptions {
        scale,
        first: tokens.first,
    };
    Tensor::from_dispatch(Dispatch::join_streams(
        table.into_dispatch(),
        tokens.tokens.into_dispatch(),
        streams.rows.into_dispatch(),
        options,
    ))
}

/// The groups of the `top_k` largest of each row's scores, `[rows, top_k]`: the largest first, of equal ones the first. What is no number is the smallest.
pub(crate) fn choose_groups(scores: Columns, top_k: usize) -> Tensor<2, Int> {
    let options = GroupOptions {
        start: scores.start,
        count: scores.count,
        top_k,
    };
    assert!(top_k <= scores.count, "groups that there are");
    Tensor::from_dispatch(Dispatch::choose_groups(
        scores.rows.into_dispatch(),
        options,
    ))
}

/// Puts the likeliest token of the `chosen` groups of each row, `[rows, top_k]`, into its place among the guesses. `hidden` are the rows, `table` has one for
/// each token, and `ordering` are the tokens of each group.
pub(crate) fn guess_of_groups(
    hidden: Tensor<2>,
    table: Tensor<2>,
    ordering: Tensor<2, Int>,
    chosen: Tensor<2, Int>,
    places: TokensAt,
) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::guess_of_groups(
        hidden.into_dispatch(),
        table.into_dispatch(),
        ordering.into_dispatch(),
        chosen.into_dispatch(),
        places.tokens.into_dispatch(),
        places.first,
    ))
}

/// Puts the likeliest token of each row of logits into its place among the guesses; the first token where none is likely.
pub(crate) fn guess_of_logits(logits: Tensor<2>, places: TokensAt) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::guess_of_logits(
        logits.into_dispatch(),
        places.tokens.into_dispatch(),
        places.first,
    ))
}

/// Whether the kernels look at the groups of such a head.
pub(crate) fn looks_at(table: &Matrix, ordering: &Tensor<2, Int>) -> bool {
    matches!(table, Matrix::Whole(_)) && ordering.dtype() == NUMBERS
}

/// How embeddings and streams are joined.
#[derive(Clone, Copy, Debug)]
pub struct JoinOptions {
    /// Of the table; without, it has a row for each row.
    pub scale: Option<f64>,
    /// The first row's token.
    pub first: usize,
}

/// Of which columns how many groups are chosen.
#[derive(Clone, Copy, Debug)]
pub struct GroupOptions {
    pub start: usize,
    pub count: usize,
    pub top_k: usize,
}

/// The kernels as operators of a backend. The functions above say what they compute; guesses are written in place, which every handle sees.
#[backend_extension(Cube, Fusion)]
pub trait GuessBackend: Backend {
    #[fusion(meta = |table, _tokens, streams, _options| {
        TensorSpec::new(Shape::new([streams.shape[0], 2 * table.shape[1]]), table.dtype)
    })]
    fn join_streams(
        table: FloatTensor<Self>,
        tokens: IntTensor<Self>,
        streams: FloatTensor<Self>,
        options: JoinOptions,
    ) -> FloatTensor<Self>;

    #[fusion(meta = |scores, options| {
        TensorSpec::new(Shape::new([scores.shape[0], options.top_k]), NUMBERS)
    })]
    fn choose_groups(scores: FloatTensor<Self>, options: GroupOptions) -> IntTensor<Self>;

    #[fusion(meta = |_hidden, _table, _ordering, _chosen, guesses, _first| guesses.clone())]
    fn guess_of_groups(
        hidden: FloatTensor<Self>,
        table: FloatTensor<Self>,
        ordering: IntTensor<Self>,
        chosen: IntTensor<Self>,
        guesses: IntTensor<Self>,
        first: usize,
    ) -> IntTensor<Self>;

    #[fusion(meta = |_logits, guesses, _first| guesses.clone())]
    fn guess_of_logits(
        logits: FloatTensor<Self>,
        guesses: IntTensor<Self>,
        first: usize,
    ) -> IntTensor<Self>;
}
