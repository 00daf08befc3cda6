//! The head sizes and the sequence lengths that the engines on matrix units accept.

use crate::problem::AttentionProblem;
use crate::types::refusal::Refusal;
use crate::types::request::MAX_LENGTH;

/// The smallest head size that the engines on matrix units accept.
///
/// With heads of one column in bf16, the gradients of the values had 2.2 times the error of the reference
/// implementation (H200, 140 queries, 270 keys). With heads of a few columns, one key may take most of a query's
/// probability, and the engine rounds this probability to half precision.
pub(crate) const NARROWEST: usize = 8;

/// Refuses heads that are too narrow for half precision, and sequences that are too long for i32 positions.
pub(crate) fn check_sizes(problem: &AttentionProblem) -> Result<(), Refusal> {
    if problem.head_dim.min(problem.value_dim) < NARROWEST {
        return Err(Refusal::Narrow {
            narrowest: NARROWEST,
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
        });
    }
    let length = problem.q_len.max(problem.kv_len);
    if length > MAX_LENGTH {
        return Err(Refusal::Length {
            length,
            limit: MAX_LENGTH,
        });
    }
    Ok(())
}
