//! The forward and backward pass of one rank.

use super::link::Link;
use crate::Error;
use attention_cube::{
    attention_with_lse,
    shards::{self, Merged},
};
use burn::tensor::{Slice, Tensor};
use std::ops::Range;

/// The queries, keys and values of one rank, on the rank's device.
#[derive(Clone)]
pub struct Shard {
    /// The queries, `[batch, q_heads, rows, head_dim]`.
    pub query: Tensor<4>,
    /// The keys, `[batch, kv_heads, rows, head_dim]`.
    pub key: Tensor<4>,
    /// The values, `[batch, kv_heads, rows, head_dim]`.
    pub value: Tensor<4>,
}

/// The results of the forward pass for the queries of one rank.
#[derive(Clone)]
pub struct Forward {
    /// The output over all keys, `[batch, q_heads, rows, head_dim]`, in the query's dtype.
    pub output: Tensor<4>,
    /// The logsumexp over all keys, `[batch, q_heads, rows]`, a natural logarithm in f32.
    pub logsumexp: Tensor<3>,
}

/// The gradients of one rank's shard, in the shapes and dtype of the shard.
#[derive(Clone)]
pub struct Gradients {
    /// The gradient of the queries.
    pub query: Tensor<4>,
    /// The gradient of the keys.
    pub key: Tensor<4>,
    /// The gradient of the values.
    pub value: Tensor<4>,
}

/// Computes the output of one rank's queries over the keys of all ranks. The outputs are merged in f32.
pub fn forward(shard: Shard, link: &mut Link) -> Result<Forward, Error> {
    let Shard { query, key, value } = shard;
    let dtype = query.dtype();
    let mut merged = None;
    link.circulate([key, value], |_, _, call, visitor| {
        let [key, value] = visitor.each_ref().map(|tensor| rows(tensor, &call.keys));
        let query = rows(&query, &call.queries);
        let (output, logsumexp) = attention_with_lse(query, key, value, call.options())?;
        let part = (output.cast(logsumexp.dtype()), logsumexp);
        merged = Some(match merged.take() {
            None => part,
            Some((output, logsumexp)) => {
                let earlier = (
                    rows(&output, &call.queries),
                    rows(&logsumexp, &call.queries),
                );
                let both = shards::merge(vec![earlier, part])?;
                (
                    replace_rows(output, &call.queries, both.0),
                    replace_rows(logsumexp, &call.queries, both.1),
                )
            }
        });
        Ok(())
    })?;
    let (output, logsumexp) = merged.expect(ONE_RANK);
    Ok(Forward {
        output: output.cast(dtype),
        logsumexp,
    })
}

/// Computes the gradients of one rank's shard. The gradients are summed in f32.
///
/// Gradients of visiting keys and values return to their owner in the dtype of the shard.
pub fn backward(
    (shard, forward, output_gradient): (Shard, Forward, Tensor<4>),
    link: &mut Link,
) -> Result<Gradients, Error> {
    let Shard { query, key, value } = shard;
    let (dtype, sums_dtype) = (query.dtype(), forward.logsumexp.dtype());
    let mut sums: Option<[Tensor<4>; 3]> = None;
    link.circulate([key, value], |link, owner, call, visitor| {
        let [key, value] = visitor.each_ref().map(|tensor| rows(tensor, &call.keys));
        let merged = Merged {
            output: rows(&forward.output, &call.queries),
            logsumexp: rows(&forward.logsumexp, &call.queries),
            output_gradient: rows(&output_gradient, &call.queries),
            logsumexp_gradient: None,
        };
        let query = rows(&query, &call.queries);
        let gradients = shards::backward(query, key, value, call.options(), merged)?;
        let (query, pair) = (gradients.query, [gradients.key, gradients.value]);
        sums = Some(match sums.take() {
            // The first step has the rank's own keys and covers all rows.
            None => {
                let [key, value] = pair;
                [query, key, value].map(|gradient| gradient.cast(sums_dtype))
            }
            Some([sum, key, value]) => {
                link.return_gradients(owner, pair)?;
                [add_rows(sum, &call.queries, query), key, value]
            }
        });
        Ok(())
    })?;
    let [query, mut key, mut value] = sums.expect(ONE_RANK);
    for (rows, [key_gradient, value_gradient]) in link.returned_gradients()? {
        key = add_rows(key, &rows, key_gradient);
        value = add_rows(value, &rows, value_gradient);
    }
    Ok(Gradients {
        query: query.cast(dtype),
        key: key.cast(dtype),
        value: value.cast(dtype),
    })
}

/// The reason why a pass has at least one step.
const ONE_RANK: &str = "`Zigzag::new` refuses a ring without ranks";

/// Returns the given rows of a tensor. Dimension 2 counts the rows.
fn rows<const D: usize>(tensor: &Tensor<D>, rows: &Range<usize>) -> Tensor<D> {
    match rows.len() == tensor.dims()[2] {
        true => tensor.clone(),
        false => tensor.clone().slice_dim(2, rows.clone()),
    }
}

/// Replaces the given rows of a tensor by `values`.
fn replace_rows<const D: usize>(
    tensor: Tensor<D>,
    rows: &Range<usize>,
    values: Tensor<D>,
) -> Tensor<D> {
    match rows.len() == tensor.dims()[2] {
        true => values,
        false => tensor.slice_assign([Slice::full(), Slice::full(), rows.clone().into()], values),
    }
}

/// Adds `part` to the given rows of `sum`, in the dtype of `sum`.
fn add_rows(sum: Tensor<4>, range: &Range<usize>, part: Tensor<4>) -> Tensor<4> {
    let part = rows(&sum, range) + part.cast(sum.dtype());
    replace_rows(sum, range, part)
}
