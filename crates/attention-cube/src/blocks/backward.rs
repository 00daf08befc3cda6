//! The backward of attention, computed block by block. The probabilities are recomputed from the saved logsumexp.

use super::bounds::Bounds;
use super::cuts::{Cuts, Sizes};
use super::grid::Grid;
use super::visible;
use crate::problem::AttentionProblem;
use crate::reference::block::{Block, floats};
use crate::reference::gradients::sinks_gradient;
use crate::reference::score_mod::add_table_gradient;
use crate::reference::scores::Scores;
use crate::reference::tensors::{
    bool_dtype, cast, fill_rows, from_groups, is_negative_infinity, sum_to, to_groups,
};
use crate::reference::visibility::absent_queries;
use crate::reference::{dropout, parts};
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionSaved, logsumexp_dtype};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, TensorData};
use std::ops::Range;
use std::slice;

/// Computes the gradients of a whole call. The block `whole` covers all queries and keys of the call. The function cuts
/// `whole` into blocks of `sizes`.
pub(super) fn of_blocks<B: Backend>(
    whole: Block<B>,
    saved: AttentionSaved<B>,
    request: BackwardRequest,
    sizes: Sizes,
) -> AttentionGradients<B> {
    let problem = &whole.problem;
    let device = whole.inputs.query.device();
    let bounds = Bounds::new(&whole);
    let cuts = Cuts::new(problem, &bounds, sizes);
    let mut sums = Sums::<B>::new(problem, &cuts, request);
    let table = whole
        .inputs
        .score_table
        .as_option()
        .filter(|_| request.table);
    sums.table = table.map(|table| vec![0.0; table.shape().num_elements()]);
    let saved = Rows::of_saved(saved, problem);
    for (s, sequences) in cuts.sequences.iter().enumerate() {
        for (h, heads) in cuts.heads.iter().enumerate() {
            let group = problem.group();
            let q_heads = heads.start * group..heads.end * group;
            let all = (0..problem.q_len, 0..problem.kv_len);
            let block = whole.part(sequences.clone(), heads.clone(), all.0.clone(), all.1);
            let block = block.in_compute_dtype();
            let rows = saved.part(sequences, &q_heads, &all.0);
            let rows = rows.with_delta(&block);
            if let Some((sum, sinks)) = sums.sinks.as_mut().zip(block.inputs.sinks.as_option()) {
                let gradient = sinks_gradient::<B>(
                    sinks.clone(),
                    rows.largest.clone(),
                    rows.logarithm.clone(),
                    rows.delta.clone(),
                    &block.problem,
                );
                let shape = Shape::new([1, q_heads.len(), 1, 1]);
                sum.add([s, h, 0, 0], B::float_reshape(gradient, shape));
            }
            for (j, keys) in cuts.keys.iter().enumerate() {
                for (i, queries) in cuts.queries.iter().enumerate() {
                    if let Some(block) = visible(&block, &bounds, queries, keys) {
                        let every = (0..block.problem.batch, 0..block.problem.q_heads);
                        let rows = rows.part(&every.0, &every.1, queries);
                        sums.add([s, h, i, j], &block, rows);
                    }
                }
            }
        }
    }
    let dtype = problem.dtype;
    let join = |grid: Option<Grid<B>>, dtype| grid.map(|grid| grid.join(dtype, &device));
    let dtype_of = |tensor: Option<&FloatTensor<B>>| tensor.map_or(dtype, |tensor| tensor.dtype());
    let sinks = join(sums.sinks, dtype_of(whole.inputs.sinks.as_option()));
    let table = sums.table.map(|sums| {
        let count = sums.len();
        let data = TensorData::new(sums, [count]).convert::<f32>();
        B::float_from_data(data, &device)
    });
    AttentionGradients {
        query: join(sums.query, dtype).into(),
        key: join(sums.key, dtype).into(),
        value: join(sums.value, dtype).into(),
        bias: join(sums.bias, dtype_of(whole.inputs.bias.as_option())).into(),
        sinks: sinks
            .map(|sinks| B::float_reshape(sinks, Shape::new([problem.q_heads])))
            .into(),
        table: table.into(),
    }
}

/// The tensors that the forward saved for some queries, in the dtype of the computation.
struct Rows<B: Backend> {
    /// `largest` is the score that the softmax subtracts, and `logarithm` is the logarithm of the softmax sum. Both
    /// have the shape `[batch, q_heads, q_len, 1]`.
    largest: FloatTensor<B>,
    logarithm: FloatTensor<B>,
    /// At first the gradient of the logsumexp, `dlse`. [`with_delta`](Self::with_delta) replaces it by
    /// `Δ = rowsum(do ∘ o) − dlse`, where `o` is the output and `do` its gradient.
    delta: FloatTensor<B>,
    /// The output, or `None` after [`with_delta`](Self::with_delta).
    output: Option<FloatTensor<B>>,
    output_gradient: FloatTensor<B>,
}

impl<B: Backend> Rows<B> {
    fn of_saved(saved: AttentionSaved<B>, problem: &AttentionProblem) -> Self {
        let compute = logsumexp_dtype(problem);
        let rows = || Shape::new([problem.batch, problem.q_heads, problem.q_len, 1]);
        let [largest, logarithm] = parts::<B>(saved.logsumexp, problem);
        let gradient = match saved.logsumexp_gradient.into_option() {
            Some(gradient) => {
                let [gradient, _] = parts::<B>(gradient, problem);
                B::float_reshape(cast::<B>(gradient, compute), rows())
            }
            None => B::float_zeros(rows(), &largest.device(), compute.into()),
        };
        Self {
            largest: B::float_reshape(largest, rows()),
            logarithm: B::float_reshape(logarithm, rows()),
            delta: gradient,
            output: Some(saved.output),
            output_gradient: saved.output_gradient,
        }
    }

    fn part(
        &self,
        sequences: &Range<usize>,
        q_heads: &Range<usize>,
        queries: &Range<usize>,
    ) -> Self {
        let part = |tensor: &FloatTensor<B>| {
            let columns = 0..tensor.shape()[3];
            let ranges = [sequences.clone(), q_heads.clone(), queries.clone(), columns];
            floats::<B>(tensor.clone(), &ranges)
        };
        Self {
            largest: part(&self.largest),
            logarithm: part(&self.logarithm),
            delta: part(&self.delta),
            output: self.output.as_ref().map(part),
            output_gradient: part(&self.output_gradient),
        }
    }

    /// Computes Δ for the rows, which must be the rows of all queries of `block`.
    fn with_delta(self, block: &Block<B>) -> Self {
        let compute = logsumexp_dtype(&block.problem);
        // A logarithm of −0 marks a query that sees no key. The output and the output gradient of such a query may
        // contain NaN, so both rows are set to zero.
        let blind = is_negative_infinity::<B>(&B::float_recip(self.logarithm.clone()));
        let absent = absent_queries::<B>(block);
        let seeing = |rows| {
            let masks = [&blind].into_iter().chain(&absent);
            masks.fold(cast::<B>(rows, compute), |rows, mask| {
                fill_rows::<B>(rows, mask)
            })
        };
        // The logsumexp of a query with neither keys nor a sink is the constant −∞, which has no gradient.
        let unseeing = is_negative_infinity::<B>(&self.largest);
        let gradient = fill_rows::<B>(self.delta, &unseeing);
        let output_gradient = seeing(self.output_gradient);
        let delta = match self.output {
            Some(output) => {
                let products = B::float_mul(output_gradient.clone(), seeing(output));
                B::float_sub(B::float_sum_dim(products, 3), gradient)
            }
            None => gradient,
        };
        Self {
            largest: fill_rows::<B>(self.largest, &unseeing),
            logarithm: self.logarithm,
            delta,
            output: None,
            output_gradient,
        }
    }
}

/// The sums of the gradients over all blocks. A gradient that is not requested is `None`.
struct Sums<B: Backend> {
    query: Option<Grid<B>>,
    key: Option<Grid<B>>,
    value: Option<Grid<B>>,
    bias: Option<Grid<B>>,
    sinks: Option<Grid<B>>,
    /// The sums for each element of the score mod's table, on the host. The code of the score mod also runs there.
    table: Option<Vec<f64>>,
}

impl<B: Backend> Sums<B> {
    fn new(problem: &AttentionProblem, cuts: &Cuts, request: BackwardRequest) -> Self {
        let q_heads = &cuts.q_heads(problem)[..];
        let (sequences, heads) = (&cuts.sequences[..], &cuts.heads[..]);
        let (queries, keys) = (&cuts.queries[..], &cuts.keys[..]);
        let grid = |heads, rows, columns: usize| {
            let columns = 0..columns;
            Grid::new([sequences, heads, rows, slice::from_ref(&columns)])
        };
        let one = 0..1;
        let one = slice::from_ref(&one);
        let of_bias = |shape: [usize; 4]| {
            let scores = [sequences, q_heads, queries, keys];
            Grid::new([0, 1, 2, 3].map(|dim| if shape[dim] == 1 { one } else { scores[dim] }))
        };
        let of_sinks = || Grid::new([one, q_heads, one, one]);
        let bias = problem.bias.filter(|_| request.bias);
        Self {
            query: (request.query).then(|| grid(q_heads, queries, problem.head_dim)),
            key: request.key.then(|| grid(heads, keys, problem.head_dim)),
            value: (request.value).then(|| grid(heads, keys, problem.value_dim)),
            bias: bias.map(|(shape, _)| of_bias(shape)),
            sinks: (request.sinks && problem.sinks.is_some()).then(of_sinks),
            table: None,
        }
    }

    /// Adds the gradients of a block. The gradient of the scores is `ds = p ∘ (do·vᵀ − Δ)` (Dao et al., FlashAttention,
    /// 2022, §B.2). `[s, h, i, j]` are the block's indices in the ranges of sequences, key heads, queries and keys.
    fn add(&mut self, [s, h, i, j]: [usize; 4], block: &Block<B>, rows: Rows<B>) {
        let problem = &block.problem;
        let scores = Scores::<B>::new(block);
        let shifted = B::float_sub(B::float_sub(scores.scores, rows.largest), rows.logarithm);
        let p = B::float_exp(shifted);
        let factors = problem.dropout.as_ref();
        let factors = factors.map(|dropout| dropout::factors::<B>(dropout, block));
        let after_dropout = |p: FloatTensor<B>| match &factors {
            Some(factors) => B::float_mul(p, factors.clone()),
            None => p,
        };
        let output_gradient = to_groups::<B>(rows.output_gradient, problem);
        if let Some(sum) = &mut self.value {
            let p = to_groups::<B>(after_dropout(p.clone()), problem);
            let dv = B::float_matmul(B::float_transpose(p), output_gradient.clone());
            sum.add([s, h, j, 0], dv);
        }
        let scores_have_gradients = self.query.is_some()
            || self.key.is_some()
            || self.bias.is_some()
            || self.table.is_some();
        if !scores_have_gradients {
            return;
        }
        let dp = B::float_matmul(output_gradient, B::float_transpose(scores.value));
        let dp = after_dropout(from_groups::<B>(dp, problem));
        // `seen` sets the gradients of hidden scores to zero. A multiplication of these gradients by the probability 0
        // does not suffice, because 0 · NaN is NaN: a hidden key's row of V and the derivative of a hidden score may be
        // NaN.
        let unseen = (scores.blind.as_ref())
            .map(|_| B::float_equal_elem(p.clone(), 0.0.into(), bool_dtype::<B>(&p)));
        let seen = |ds: FloatTensor<B>| match &unseen {
            Some(unseen) => B::float_mask_fill(ds, unseen.clone(), 0.0.into()),
            None => ds,
        };
        let ds = seen(B::float_mul(p, B::float_sub(dp, rows.delta)));
        if let (Some(sum), Some((shape, _))) = (&mut self.bias, problem.bias) {
            sum.add([s, h, i, j], sum_to::<B>(ds.clone(), &Shape::new(shape)));
        }
        if let (Some(sums), Some(before), Some(learned)) =
            (&mut self.table, scores.before, problem.learned_code())
        {
            add_table_gradient::<B>(sums, before, ds.clone(), learned, block);
        }
        let ds = match scores.slope {
            Some(slope) => seen(B::float_mul(ds, slope)),
            None => ds,
        };
        let ds = to_groups::<B>(B::float_mul_scalar(ds, problem.scale.into()), problem);
        if let Some(sum) = &mut self.query {
            let dq = from_groups::<B>(B::float_matmul(ds.clone(), scores.key), problem);
            let dq = match &scores.blind {
                Some(blind) => fill_rows::<B>(dq, blind),
                None => dq,
            };
            sum.add([s, h, i, 0], dq);
        }
        if let Some(sum) = &mut self.key {
            let dk = B::float_matmul(B::float_transpose(ds), scores.query);
            sum.add([s, h, j, 0], dk);
        }
    }
}
