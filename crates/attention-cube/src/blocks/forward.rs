//! The forward of attention, computed block by block: for each block of queries, an online softmax over the blocks of
//! keys.

use super::bounds::Bounds;
use super::cuts::{Cuts, Sizes};
use super::grid::Grid;
use super::visible;
use crate::reference::block::Block;
use crate::reference::dropout;
use crate::reference::scores::{Scores, lowest};
use crate::reference::tensors::{
    bool_dtype, elementwise_max, fill_rows, float_dtype, from_groups, to_groups,
};
use crate::types::tensors::{AttentionOutput, logsumexp_dtype};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use std::slice;

/// Computes the forward of a whole call. The block `whole` covers all queries and keys of the call. The logsumexp of
/// the returned [`AttentionOutput`] has two parts: the largest score, and the logarithm of the softmax sum. The second
/// part is −0 for a query that sees no key.
pub(super) fn of_blocks<B: Backend>(whole: Block<B>, sizes: Sizes) -> AttentionOutput<B> {
    let problem = &whole.problem;
    let device = whole.inputs.query.device();
    let bounds = Bounds::new(&whole);
    let cuts = Cuts::new(problem, &bounds, sizes);
    let q_heads = cuts.q_heads(problem);
    let grid = |columns| {
        let columns = 0..columns;
        let columns = slice::from_ref(&columns);
        Grid::<B>::new([&cuts.sequences, &q_heads, &cuts.queries, columns])
    };
    let (mut output, mut largest, mut logarithm) = (grid(problem.value_dim), grid(1), grid(1));
    for (s, sequences) in cuts.sequences.iter().enumerate() {
        for (h, heads) in cuts.heads.iter().enumerate() {
            let all = (0..problem.q_len, 0..problem.kv_len);
            let heads = whole.part(sequences.clone(), heads.clone(), all.0, all.1);
            let heads = heads.in_compute_dtype();
            for (i, queries) in cuts.queries.iter().enumerate() {
                let mut rows = Rows::new(&heads, queries.len());
                for keys in &cuts.keys {
                    if let Some(block) = visible(&heads, &bounds, queries, keys) {
                        rows.add(&block);
                    }
                }
                let found = rows.finish();
                let place = [s, h, i, 0];
                if let Some(rows) = found.output {
                    output.add(place, rows);
                }
                largest.add(place, found.largest);
                logarithm.add(place, found.logarithm);
            }
        }
    }
    let compute = logsumexp_dtype(problem);
    let parts = [largest, logarithm].map(|part| {
        let part = part.join(compute, &device);
        B::float_reshape(part, Shape::new(problem.logsumexp_shape()))
    });
    AttentionOutput {
        output: output.join(problem.dtype, &device),
        logsumexp: B::float_cat(parts.into(), 0),
    }
}

/// The state of the online softmax of some queries, after the blocks of keys that were added so far.
struct Rows<B: Backend> {
    /// The largest score of each query so far, or the query's sink if the sink is larger, `[batch, q_heads, q_len, 1]`.
    /// The number is finite even for a query that sees no key.
    largest: FloatTensor<B>,
    /// The sum of `exp(score − largest)` over the keys, without the sink.
    sum: FloatTensor<B>,
    /// The sum of the rows of V, weighted by `exp(score − largest)`, or `None` if no block was added.
    output: Option<FloatTensor<B>>,
    /// The sinks, `[1, q_heads, 1, 1]`.
    sinks: Option<FloatTensor<B>>,
}

/// The final results of some queries.
struct Finished<B: Backend> {
    /// The score that the softmax subtracts, `[batch, q_heads, q_len, 1]`. It is the first part of the logsumexp.
    largest: FloatTensor<B>,
    /// The logarithm of the softmax sum, `[batch, q_heads, q_len, 1]`. It is the second part of the logsumexp.
    logarithm: FloatTensor<B>,
    /// The output, or `None` if the queries see no block of keys.
    output: Option<FloatTensor<B>>,
}

impl<B: Backend> Rows<B> {
    /// Returns the initial state of the softmax for `count` queries of the block `heads`, before any keys are added.
    fn new(heads: &Block<B>, count: usize) -> Self {
        let problem = &heads.problem;
        let dtype = float_dtype(logsumexp_dtype(problem));
        let shape = Shape::new([problem.batch, problem.q_heads, count, 1]);
        let device = heads.inputs.query.device();
        let sinks = Scores::<B>::sinks(heads);
        let largest = B::float_full(shape.clone(), lowest(problem).into(), &device, dtype);
        Self {
            largest: match &sinks {
                Some(sinks) => elementwise_max::<B>(largest, sinks.clone()),
                None => largest,
            },
            sum: B::float_zeros(shape, &device, dtype),
            output: None,
            sinks,
        }
    }

    /// Updates the online softmax with the keys of a block.
    fn add(&mut self, block: &Block<B>) {
        let problem = &block.problem;
        let scores = Scores::<B>::new(block);
        let of_block = B::float_max_dim(scores.scores.clone(), 3);
        let largest = elementwise_max::<B>(self.largest.clone(), of_block);
        let p = B::float_exp(B::float_sub(scores.scores, largest.clone()));
        let sum = B::float_sum_dim(p.clone(), 3);
        let p = match &problem.dropout {
            Some(dropout) => B::float_mul(p, dropout::factors::<B>(dropout, block)),
            None => p,
        };
        let output = B::float_matmul(to_groups::<B>(p, problem), scores.value);
        let mut output = from_groups::<B>(output, problem);
        if let Some(blind) = &scores.blind {
            // If a query sees no key of this block, set the query's row of `output` to zero. Otherwise the row could be
            // NaN: a row of V that only other queries see may contain NaN, and 0 · NaN is NaN.
            output = fill_rows::<B>(output, blind);
        }
        (self.sum, self.output) = match self.output.take() {
            None => (sum, Some(output)),
            Some(before) => {
                let factor = B::float_sub(self.largest.clone(), largest.clone());
                let factor = B::float_exp(factor);
                let before = B::float_mul(before, factor.clone());
                let sum = B::float_add(B::float_mul(self.sum.clone(), factor), sum);
                (sum, Some(B::float_add(before, output)))
            }
        };
        self.largest = largest;
    }

    /// Divides the output by the softmax sum, and computes the logsumexp.
    fn finish(self) -> Finished<B> {
        let bools = bool_dtype::<B>(&self.sum);
        let is_zero = |sum: &FloatTensor<B>| B::float_equal_elem(sum.clone(), 0.0.into(), bools);
        let blind = is_zero(&self.sum);
        let mut sum = self.sum;
        if let Some(sinks) = &self.sinks {
            let sinks = B::float_sub(sinks.clone(), self.largest.clone());
            sum = B::float_add(sum, B::float_exp(sinks));
        }
        // `unseeing` marks the queries with neither visible keys nor a sink. Their sum is set to 1 to avoid a division
        // by zero.
        let unseeing = is_zero(&sum);
        let sum = B::float_mask_fill(sum, unseeing.clone(), 1.0.into());
        let output = self.output.map(|output| {
            let output = B::float_div(output, sum.clone());
            fill_rows::<B>(output, &blind)
        });
        Finished {
            largest: B::float_mask_fill(self.largest, unseeing, f64::NEG_INFINITY.into()),
            logarithm: B::float_mask_fill(B::float_log(sum), blind, (-0.0).into()),
            output,
        }
    }
}
