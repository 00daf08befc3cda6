//! The gradient of a bias that is the same for all keys, without a look at any score.
//!
//! Such a bias moves all scores of a query together. The softmax does not notice, but for the sink, which stays where it is; the
//! logsumexp moves along. So the gradients of a query's scores sum to `dlse + Δ · exp(sink − lse)`, and to 0 where it sees no key.
//!
//! Budget: no shared memory, a few registers; bound by memory, of which there is little: three numbers a query. A unit sums part
//! of what one number of the bias is broadcast along.

use crate::math::score::{is_hidden, probability};
use crate::passes::delta::kernel::row_terms_of;
use cubecl::prelude::*;

/// The bias's own sizes, and how often each repeats: one of both is 1.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Spread {
    pub heads: u32,
    pub queries: u32,
    /// Numbers of the bias.
    pub numbers: u32,
    pub repeated_heads: u32,
    pub repeated_queries: u32,
    /// Queries, counted through heads and sequences, that read a number.
    pub repeats: u32,
    /// In how many parts these are summed.
    pub parts: u32,
}

/// Sums every `parts`-th of a number's queries, to `[parts, numbers]`.
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
                let terms = row_terms_of(rows, batch, head, query as i32, q_len as i32);
                let sink = f32::cast_from(sinks[head as usize * sinks.stride(0)]);
                value += terms.delta * probability(sink, reference, logarithm);
            }
            ComptimeOption::None => {}
        }
        sum += select(is_hidden(reference), 0.0f32, value);
        repeat += spread.parts;
    }
    gradient[index as usize] = sum;
}
