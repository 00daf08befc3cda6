//! Computes the gradient of a bias that is constant over keys, without computing any score.
//!
//! Such a bias adds one number to all scores of a query. Without a sink, this addition changes the LSE but no
//! probability. With a sink, the probabilities also change, because the bias is not added to the sink.
//!
//! The gradient of a bias element is the sum of all score gradients of the queries that read the element. The score
//! gradients of one query sum to `dlse + Δ · exp(sink − lse)`, or to 0 if the query sees no key. Here `dlse` is the
//! gradient of the LSE, `o` the output, and `do` the output's gradient. `Δ` is `rowsum(do ∘ o) − dlse`.
//!
//! Schedule: the kernel divides the queries that read one bias element into groups. Each unit adds up the score
//! gradients of one group. Budget: no shared memory and a few registers. Bound: memory, because the kernel reads up to
//! four f32 values per query.

use crate::auxiliary::delta::kernel::row_lse_delta_of;
use crate::math::score::{is_hidden, probability};
use cubecl::prelude::*;

/// The sizes of a bias, and the number of times that broadcasting repeats the bias along each dimension. If the bias is
/// broadcast along a dimension, the bias has size 1 in this dimension. Along every other dimension, the number of
/// repeats is 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Spread {
    pub heads: u32,
    pub queries: u32,
    /// The number of elements of the bias.
    pub numbers: u32,
    pub repeated_heads: u32,
    pub repeated_queries: u32,
    /// The number of queries, over all heads and sequences, that read one bias element.
    pub repeats: u32,
    /// The number of groups into which the kernel divides the queries of a bias element. One unit adds up the score
    /// gradients of one group.
    pub parts: u32,
}

/// Computes `parts` partial gradients of each bias element, and writes them to
/// `gradient [parts, elements of the bias]`. One unit computes one partial gradient: the sum over every `parts`-th
/// query that reads the bias element.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn constant_bias_gradient<S: Float>(
    rows: &Tensor<f32>,
    logsumexp: &Tensor<f32>,
    logsumexp_gradient: ComptimeOption<&Tensor<f32>>,
    sinks: ComptimeOption<&Tensor<S>>,
    gradient: &mut Tensor<f32>,
    spread: Spread,
    q_len: u32,
    #[define(S)] _sink_element: ElemType,
) {
    let index = ABSOLUTE_POS as u32;
    if index >= spread.numbers * spread.parts {
        terminate!();
    }
    let number = index % spread.numbers;
    let own_query = number % spread.queries;
    let own_head = number / spread.queries % spread.heads;
    let own_batch = number / spread.queries / spread.heads;
    let mut sum = 0.0f32;
    let mut repeat = index / spread.numbers;
    while repeat < spread.repeats {
        let query = own_query + repeat % spread.repeated_queries;
        let head = own_head + repeat / spread.repeated_queries % spread.repeated_heads;
        let batch = own_batch + repeat / spread.repeated_queries / spread.repeated_heads;
        let mut value = 0.0f32;
        #[comptime]
        match &logsumexp_gradient {
            ComptimeOption::Some(gradient) => {
                value = gradient[batch as usize * gradient.stride(0)
                    + head as usize * gradient.stride(1)
                    + query as usize * gradient.stride(2)];
            }
            ComptimeOption::None => {}
        }
        let at = batch as usize * logsumexp.stride(0)
            + head as usize * logsumexp.stride(1)
            + query as usize * logsumexp.stride(2);
        let reference = logsumexp[at];
        let logarithm = logsumexp[at + logsumexp.shape(0) / 2 * logsumexp.stride(0)];
        #[comptime]
        match &sinks {
            ComptimeOption::Some(sinks) => {
                let lse_delta = row_lse_delta_of(rows, batch, head, query as i32, q_len as i32);
                let sink = f32::cast_from(sinks[head as usize * sinks.stride(0)]);
                value += lse_delta.delta * probability(sink, reference, logarithm);
            }
            ComptimeOption::None => {}
        }
        sum += select(is_hidden(reference), 0.0f32, value);
        repeat += spread.parts;
    }
    gradient[index as usize] = sum;
}
