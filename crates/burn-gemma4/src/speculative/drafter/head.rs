//! The drafter's head, which chooses the most likely token for a hidden state. The head considers the whole vocabulary,
//! or only the tokens of the best groups.

#[cfg(feature = "cube")]
use crate::op;
#[cfg(feature = "cube")]
use crate::op::column_slice::ColumnSlice;
#[cfg(feature = "cube")]
use crate::op::drafter_head;
#[cfg(feature = "cube")]
use crate::op::drafter_head::TokensAt;
use crate::{
    config::drafter::OrderedEmbeddings,
    model::layer::Linear,
    op::{
        argmax::argmax,
        linear::{self, Matrix},
    },
};
use burn::{
    module::Module,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

/// A head that first scores groups of tokens by the groups' centroids. The head then computes logits only for the
/// tokens of the best groups.
#[derive(Module, Debug)]
pub struct MaskedEmbedding {
    /// The centroids of the groups, `[groups, hidden]`.
    pub centroids: Linear,
    /// The token ids in each group, `[groups, tokens per group]`.
    #[module(skip)]
    token_ordering: Tensor<2, Int>,
    /// The indices `0..groups`. The indices are uploaded once, because a captured CUDA graph must not read host memory.
    #[module(skip)]
    numbers: Tensor<1, Int>,
    #[module(skip)]
    top_k: usize,
}

impl MaskedEmbedding {
    /// Creates the head. `groups` lists the token ids of the first group, then those of the second group, and so on.
    pub(super) fn new(
        ordered: &OrderedEmbeddings,
        groups: &[i32],
        centroids: Linear,
        device: &Device,
    ) -> Self {
        let shape = [ordered.num_centroids, groups.len() / ordered.num_centroids];
        let groups = TensorData::new(groups.to_vec(), shape);
        Self {
            centroids,
            // The kernels read i32. The device's default integer type may be another type, so give the type explicitly.
            token_ordering: Tensor::from_data(groups, (device, DType::I32)),
            numbers: numbers(ordered.num_centroids, device),
            top_k: ordered.top_k,
        }
    }

    /// Returns, for each row, the token with the largest logit among the tokens of the best groups, `[rows]`. `hidden`
    /// is `[rows, hidden]`, and the groups' `scores` are `[rows, groups]`. The embedding `table` has one row per token.
    pub(super) fn token(
        &self,
        hidden: Tensor<2>,
        scores: Tensor<2>,
        table: &Matrix,
    ) -> Tensor<1, Int> {
        let of_row = |row: usize| {
            let [scores, hidden] = [&scores, &hidden].map(|rows| rows.clone().narrow(0, row, 1));
            self.token_of_row(scores.squeeze_dim(0), hidden, table)
        };
        match hidden.dims()[0] {
            1 => of_row(0),
            rows => Tensor::cat((0..rows).map(of_row).collect(), 0),
        }
    }

    /// True if the kernels support this head.
    #[cfg(feature = "cube")]
    pub(super) fn has_kernels(&self, table: &Matrix) -> bool {
        drafter_head::looks_at(table, &self.token_ordering)
    }

    /// Computes the same tokens as [`token`](Self::token), but with kernels. `places` consists of a tensor for all
    /// draft tokens of one drafter run, and an index in this tensor. The function writes the tokens to the tensor,
    /// beginning at the index.
    #[cfg(feature = "cube")]
    pub(super) fn guess(
        &self,
        hidden: Tensor<2>,
        scores: ColumnSlice,
        table: Tensor<2>,
        places: TokensAt,
    ) -> Tensor<1, Int> {
        let chosen = drafter_head::choose_groups(scores, self.top_k);
        drafter_head::guess_of_groups(hidden, table, self.token_ordering.clone(), chosen, places)
    }

    /// Computes [`token`](Self::token) for one row. `scores` are the groups' scores, and the result is `[1]`.
    fn token_of_row(&self, scores: Tensor<1>, hidden: Tensor<2>, table: &Matrix) -> Tensor<1, Int> {
        let groups = largest(scores, self.numbers.clone(), self.top_k);
        let tokens = self.token_ordering.clone().select(0, groups).flatten(0, 1);
        let rows = table.select(tokens.clone());
        tokens.select(0, token(logits(hidden, rows)))
    }
}

/// Computes logits: hidden states `[rows, hidden]` times the transpose of `table`, `[tokens, hidden]`.
pub(super) fn logits(hidden: Tensor<2>, table: Matrix) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if op::serve(&hidden) && hidden.dims()[0] <= op::gemv::GEMV_MAX_ROWS {
        return op::gemv::project(hidden, table, None, op::gemv::Origin::Computed);
    }
    linear::rows(hidden, table)
}

/// Returns the argmax of each row of the logits `[rows, columns]`, as `[rows]`. A row of NaN gives token 0, because the
/// caller always needs a valid token.
pub(super) fn token(logits: Tensor<2>) -> Tensor<1, Int> {
    argmax(logits).clamp_min(0)
}

/// Returns the integers `0..count` on the device.
fn numbers(count: usize, device: &Device) -> Tensor<1, Int> {
    let numbers: Vec<i32> = (0..count as i32).collect();
    Tensor::from_data(TensorData::new(numbers, [count]), (device, DType::I32))
}

/// Returns the indices of the `count` largest scores, the largest first. Equal scores are ordered by index. `scores` is
/// `[all]`, and `places` are the integers `0..all`.
///
/// This function compares all pairs of scores on the device. With Burn's sort, which runs on the host, every draft
/// token would wait for the host.
fn largest(scores: Tensor<1>, places: Tensor<1, Int>, count: usize) -> Tensor<1, Int> {
    let [all] = scores.dims();
    let [rows, columns] = [
        scores.clone().unsqueeze_dim::<2>(1),
        scores.unsqueeze_dim::<2>(0),
    ];
    let [row, column] = [
        places.clone().unsqueeze_dim::<2>(1),
        places.clone().unsqueeze_dim::<2>(0),
    ];
    // Row `i` of `before` has a 1 in column `j` if score `j` is larger than score `i`, or if the scores are equal and
    // `j` is smaller than `i`.
    let first = columns
        .clone()
        .equal(rows.clone())
        .bool_and(column.lower(row));
    let before = columns.greater(rows).bool_or(first).int();
    let rank = before.sum_dim(1).reshape([1, all]);
    let found = rank
        .equal(places.clone().narrow(0, 0, count).unsqueeze_dim::<2>(1))
        .int();
    let found = (found * places.clone().unsqueeze_dim::<2>(0)).sum_dim(1);
    // Clamp the indices to the valid range. For each rank, `found` holds the sum of the indices of all scores with this
    // rank. NaN scores may share a rank, so this sum may exceed the largest index.
    found.squeeze_dim(1).clamp(0, all as i64 - 1)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn places(scores: &[f32], count: usize) -> Vec<i64> {
        let device = Device::flex();
        let scores = Tensor::<1>::from_data(TensorData::from(scores), &device);
        let numbers = numbers(scores.dims()[0], &device);
        largest(scores, numbers, count)
            .into_data()
            .iter::<i64>()
            .collect()
    }

    #[test]
    fn largest_with_ties_orders_by_score_then_index() {
        let scores = [0.5, 3.0, -1.0, 3.0, 2.0];
        assert_eq!(places(&scores, 1), [1]);
        assert_eq!(places(&scores, 4), [1, 3, 4, 0]);
        assert_eq!(places(&scores, 5), [1, 3, 4, 0, 2]);
    }

    #[test]
    fn largest_of_nan_gives_valid_indices() {
        for place in places(&[f32::NAN; 5], 3) {
            assert!((0..5).contains(&place));
        }
    }
}
