//! The gradient of the sinks by an explicit formula.

use super::tensors::{cast, is_negative_infinity, sum_to};
use crate::problem::AttentionProblem;
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// Computes the sinks' gradient. The gradient of a head's sink is `−Σ exp(sink − lse)·delta`, summed over the batch and
/// the queries. A sink acts like the score of an additional key whose row of V is zero.
///
/// # Shapes
/// `sinks [q_heads]`. `reference`, `logarithm` and `delta` are `[batch, q_heads, q_len, 1]`. `reference` holds the
/// numbers that the softmax subtracts from the scores, and `logarithm` the logarithms of the softmax sums. The LSE is
/// `reference + logarithm`. `delta` is `rowsum(do ∘ o) − dlse`. Here `o` is the output, `do` is the output's gradient,
/// and `dlse` is the LSE's gradient. The result is `[q_heads]`, in the dtype of `reference`.
pub(crate) fn sinks_gradient<B: Backend>(
    sinks: FloatTensor<B>,
    reference: FloatTensor<B>,
    logarithm: FloatTensor<B>,
    delta: FloatTensor<B>,
    problem: &AttentionProblem,
) -> FloatTensor<B> {
    let compute = reference.dtype();
    let per_head = Shape::new([1, problem.q_heads, 1, 1]);
    let shape = sinks.shape();
    let scores = B::float_reshape(cast::<B>(sinks, compute), per_head.clone());
    // A sink of −∞ counts as no sink. The gradient of such a sink is 0, even if the head's logsumexp or delta is NaN.
    let none = is_negative_infinity::<B>(&scores);
    let p = B::float_exp(B::float_sub(B::float_sub(scores, reference), logarithm));
    let gradient = sum_to::<B>(B::float_neg(B::float_mul(p, delta)), &per_head);
    let gradient = B::float_mask_fill(gradient, none, 0.0.into());
    B::float_reshape(gradient, shape)
}
