//! From a drafter's stream to a token, over the whole vocabulary or over a few groups of tokens.

use crate::{
    config::drafter::OrderedEmbeddings,
    model::layer::Linear,
    op::{
        argmax::argmax,
        linear::{self, Matrix},
    },
};
#[cfg(feature = "cube")]
use crate::{
    model::layer::operators::Columns,
    op::{
        self,
        guess::{self, TokensAt},
    },
};
use burn::{
    module::Module,
    tensor::{DType, Device, Int, Tensor, TensorData},
};

/// A head that first chooses among groups of tokens, each by its centroid, and looks only at the tokens of the best.
#[derive(Module, Debug)]
pub struct MaskedEmbedding {
    /// `[groups, hidden]`.
    pub centroids: Linear,
    /// `[groups, tokens of each]`.
    #[module(skip)]
    token_ordering: Tensor<2, Int>,
    /// `[groups]`: their numbers. Uploaded once: a captured graph must not read the host's memory.
    #[module(skip)]
    numbers: Tensor<1, Int>,
    #[module(skip)]
    top_k: usize,
}

impl MaskedEmbedding {
    /// `groups` are the tokens of each group, one group after the other.
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
            // As kernels take them, whatever the device's integers are.
            token_ordering: Tensor::from_data(groups, (device, DType::I32)),
            numbers: numbers(ordered.num_centroids, device),
            top_k: ordered.top_k,
        }
    }

    /// The likeliest token of the best groups, `[rows]`, for `[rows, hidden]` and what centroids make of them. `table` has a row for each token.
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

    /// Whether kernels look at the groups' tokens.
    #[cfg(feature = "cube")]
    pub(super) fn has_kernels(&self, table: &Matrix) -> bool {
        guess::looks_at(table, &self.token_ordering)
    }

    /// [`token`](Self::token) by kernels, in its place among the guesses.
    #[cfg(feature = "cube")]
    pub(super) fn guess(
        &self,
        hidden: Tensor<2>,
        scores: Columns,
        table: Tensor<2>,
        places: TokensAt,
    ) -> Tensor<1, Int> {
        let chosen = guess::choose_groups(scores, self.top_k);
        guess::guess_of_groups(hidden, table, self.token_ordering.clone(), chosen, places)
    }

    /// [`token`](Self::token) of one row, `[1]`, by its groups' scores.
    fn token_of_row(&self, scores: Tensor<1>, hidden: Tensor<2>, table: &Matrix) -> Tensor<1, Int> {
        let groups = largest(scores, self.numbers.clone(), self.top_k);
        let tokens = self.token_ordering.clone().select(0, groups).flatten(0, 1);
        let rows = table.select(tokens.clone());
        tokens.select(0, token(logits(hidden, rows)))
    }
}

/// `[rows, hidden]` times the transpose of `[tokens, hidden]`.
pub(super) fn logits(hidden: Tensor<2>, table: Matrix) -> Tensor<2> {
    #[cfg(feature = "cube")]
    if op::serve(&hidden) && hidden.dims()[0] <= linear::few_rows::MOST_ROWS {
        return linear::few_rows::project(hidden, table, None, linear::few_rows::Origin::Computed);
    }
    linear::rows(hidden, table)
}

/// The likeliest column of `[rows, columns]`: `[rows]`. A guess is needed even where nothing is likely.
pub(super) fn token(logits: Tensor<2>) -> Tensor<1, Int> {
    argmax(logits).clamp_min(0)
}

/// `0..count` on the device.
fn numbers(count: usize, device: &Device) -> Tensor<1, Int> {
    let numbers: Vec<i32> = (0..count as i32).collect();
    Tensor::from_data(TensorData::new(numbers, [count]), (device, DType::I32))
}

/// The places of the `count` largest of `[all]` scores, the largest first, of equal ones the first. By counting for each how many are
/// before it: Burn sorts on the host, which every guess would wait for. `places` are their numbers.
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
    // Whether the column's score comes before the row's.
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
    // Among scores that are no numbers, none is before another.
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
    fn the_largest_come_first() {
        let scores = [0.5, 3.0, -1.0, 3.0, 2.0];
        assert_eq!(places(&scores, 1), [1]);
        assert_eq!(places(&scores, 4), [1, 3, 4, 0]);
        assert_eq!(places(&scores, 5), [1, 3, 4, 0, 2]);
    }

    #[test]
    fn what_is_no_number_is_still_a_place() {
        for place in places(&[f32::NAN; 5], 3) {
            assert!((0..5).contains(&place));
        }
    }
}
