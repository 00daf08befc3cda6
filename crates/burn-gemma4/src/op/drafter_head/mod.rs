//! The first and last kernels of a drafter's step in speculative decoding on CubeCL devices.
//!
//! One tensor holds all draft tokens of a drafter run, in the order of the drafter's steps. Each step reads its input token
//! from this tensor. The target model's verification pass reads all draft tokens.

mod groups;
mod kernel;
mod launch;
#[cfg(test)]
mod tests;

use super::linear::Matrix;
use crate::op::column_slice::ColumnSlice;
use burn::{
    backend::{
        Backend, Dispatch, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Int, Shape, Tensor},
};

/// The dtype of token ids.
pub(crate) const NUMBERS: DType = DType::I32;

/// A range of consecutive token ids, one per row, in a tensor of dtype [`NUMBERS`].
#[derive(Clone)]
pub(crate) struct TokensAt {
    pub tokens: Tensor<1, Int>,
    /// The index of the first row's token in `tokens`.
    pub first: usize,
}

/// The source of the embeddings for [`join`].
pub(crate) enum Embeddings {
    /// The embedding table, `[tokens, columns]`, and a scale that is rounded to the table's dtype.
    Table { table: Tensor<2>, scale: f64 },
    /// The embedding of each row's token, already looked up and scaled: `[rows, columns]`.
    Rows(Tensor<2>),
}

/// Concatenates the embedding of each row's token with the row's residual stream. The output is `[rows, 2 · columns]`.
pub(crate) fn join(embeddings: Embeddings, tokens: TokensAt, streams: ColumnSlice) -> Tensor<2> {
    let (table, scale) = match embeddings {
        Embeddings::Table { table, scale } => (table, Some(scale)),
        Embeddings::Rows(rows) => (rows, None),
    };
    assert_eq!(streams.start, 0, "streams: expected to start at column 0");
    assert_eq!(
        streams.count,
        table.dims()[1],
        "streams: expected as many columns as the embeddings"
    );
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

/// Returns the indices of the groups with the `top_k` largest scores of each row, `[rows, top_k]`, in descending order.
/// On ties the lower index comes first. NaN counts as the smallest score.
pub(crate) fn choose_groups(scores: ColumnSlice, top_k: usize) -> Tensor<2, Int> {
    let options = GroupOptions {
        start: scores.start,
        count: scores.count,
        top_k,
    };
    assert!(top_k <= scores.count, "top_k: exceeds the number of groups");
    Tensor::from_dispatch(Dispatch::choose_groups(
        scores.rows.into_dispatch(),
        options,
    ))
}

/// Writes the most likely token of each row's chosen groups to the tensor of draft tokens.
///
/// # Shapes
/// - `hidden`: `[rows, columns]`.
/// - `table`: `[tokens, columns]`, the LM head.
/// - `ordering`: `[groups, tokens per group]`, the token ids of each group.
/// - `chosen`: `[rows, top_k]`, the indices of the chosen groups.
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

/// Writes the most likely token of each row of logits, `[rows, tokens]`, to the tensor of draft tokens. Writes token 0 if
/// no logit is above −∞.
pub(crate) fn guess_of_logits(logits: Tensor<2>, places: TokensAt) -> Tensor<1, Int> {
    Tensor::from_dispatch(Dispatch::guess_of_logits(
        logits.into_dispatch(),
        places.tokens.into_dispatch(),
        places.first,
    ))
}

/// True if the kernels support this clustered LM head: `table` is in floats, and `ordering` has the dtype of token ids.
pub(crate) fn looks_at(table: &Matrix, ordering: &Tensor<2, Int>) -> bool {
    matches!(table, Matrix::Whole(_)) && ordering.dtype() == NUMBERS
}

/// The options of [`join`].
#[derive(Clone, Copy, Debug)]
pub struct JoinOptions {
    /// The scale of the table's embeddings, or `None` if row `i` of the table is the embedding of output row `i`.
    pub scale: Option<f64>,
    /// The index of the first row's token in the tensor of tokens.
    pub first: usize,
}

/// The range of columns that holds the scores, and the number of groups to choose.
#[derive(Clone, Copy, Debug)]
pub struct GroupOptions {
    pub start: usize,
    pub count: usize,
    pub top_k: usize,
}

/// The backend operators that run the kernels. Draft tokens are written in place, so every handle of the tensor sees
/// the writes.
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
