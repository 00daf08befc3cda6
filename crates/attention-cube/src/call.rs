//! One call of the operator, from the validation of the arguments to the call of the backend.

use crate::backend::{AttentionBackend, check_backend};
use crate::error::AttentionError;
use crate::options::AttentionOptions;
use crate::problem::AttentionProblem;
use crate::types::tensors::{AttentionOutput, inputs};
use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// Returns the output, the logsumexp and the validated problem. The logsumexp has two parts: the score that the softmax
/// subtracted, and the logarithm of the softmax sum.
pub(crate) fn attend(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<(AttentionOutput<Dispatch>, AttentionProblem), AttentionError> {
    let problem = AttentionProblem::new(&query, &key, &value, &options)?;
    check_backend(&query.device())?;
    let inputs = inputs(query, key, value, options);
    Ok((
        Dispatch::attention_forward(inputs, problem.clone()),
        problem,
    ))
}

/// Computes attention, and returns only the output.
pub(crate) fn compute_output(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let (result, _) = attend(query, key, value, options)?;
    Ok(Tensor::from_dispatch(result.output))
}
