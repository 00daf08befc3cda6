//! Attention in Burn's own tensor operations, in blocks of queries and keys, for devices without kernels.
//!
//! The [reference implementation](crate::reference) computes the scores of a block. The softmax is online (Milakov and
//! Gimelshein, Online normalizer calculation for softmax, 2018), so the memory is O(block · block + q_len + kv_len). A
//! block in which no query sees a key is skipped. The backward recomputes the probabilities from the saved logsumexp.
//!
//! Attention in blocks supports every problem on every backend. Forward and backward cut a problem into the same
//! blocks, so that both compute bitwise equal scores. Recomputed probabilities therefore stay exact even if scores are
//! huge.

mod backward;
mod bounds;
mod cuts;
mod forward;
mod grid;
#[cfg(all(test, feature = "flex"))]
mod tests;

use self::bounds::{Bounds, Seen};
use self::cuts::Sizes;
use crate::problem::AttentionProblem;
use crate::reference::{block::Block, empty, pages};
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use burn::backend::Backend;
use std::ops::Range;

/// Computes the output and the logsumexp of a validated problem. The logsumexp has two parts: the scores that the
/// softmax subtracted, and the logarithms of the softmax sums.
pub(crate) fn forward<B: Backend>(
    inputs: AttentionInputs<B>,
    problem: &AttentionProblem,
) -> AttentionOutput<B> {
    if problem.is_empty() {
        return empty::forward_in_parts(&inputs, problem);
    }
    let (inputs, problem) = pages::contiguous::<B>(inputs, problem);
    forward::of_blocks(Block::whole(inputs, problem), Sizes::MEASURED)
}

/// Computes the gradients of a validated problem over contiguous keys and values.
pub(crate) fn backward<B: Backend>(
    inputs: AttentionInputs<B>,
    saved: AttentionSaved<B>,
    problem: &AttentionProblem,
    request: BackwardRequest,
) -> AttentionGradients<B> {
    if problem.is_empty() {
        return empty::backward(inputs, saved, problem, request);
    }
    let whole = Block::whole(inputs, problem.clone());
    backward::of_blocks(whole, saved, request, Sizes::MEASURED)
}

/// Returns the part of `heads` with the given queries and keys, or `None` if none of these queries sees any of these
/// keys. `heads` is a block with all queries and keys of its sequences.
fn visible<B: Backend>(
    heads: &Block<B>,
    bounds: &Bounds,
    queries: &Range<usize>,
    keys: &Range<usize>,
) -> Option<Block<B>> {
    let problem = &heads.problem;
    let (first, q_head) = (heads.place.sequence, heads.place.q_head);
    let seen = bounds.seen(
        first..first + problem.batch,
        q_head..q_head + problem.q_heads,
        queries,
        keys,
    );
    if seen == Seen::Nothing {
        return None;
    }
    let all = (0..problem.batch, 0..problem.kv_heads);
    let block = heads.part(all.0, all.1, queries.clone(), keys.clone());
    // If the block has no hidden keys, only a score mod or a mask mod needs the positions of its queries and keys.
    // Without these mods, `without_positions` removes the inputs that only hide keys, such as lengths and segments.
    match seen == Seen::Everything && !problem.has_code() {
        true => Some(block.without_positions()),
        false => Some(block),
    }
}
