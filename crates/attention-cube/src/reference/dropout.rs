//! The dropout factors of the reference implementation, drawn on the host.

use crate::math::dropout::{bits, head_key};
use crate::options::Dropout;
use crate::problem::AttentionProblem;
use crate::types::tensors::logsumexp_dtype;
use burn::backend::{
    Backend,
    tensor::{Device, FloatTensor},
};
use burn::tensor::TensorData;

/// Returns the dropout factors of all probabilities, `[batch, q_heads, q_len, kv_len]`. A dropped probability has the factor
/// 0.
pub(super) fn factors<B: Backend>(
    dropout: &Dropout,
    problem: &AttentionProblem,
    device: &Device<B>,
) -> FloatTensor<B> {
    let AttentionProblem {
        batch,
        q_heads,
        q_len,
        kv_len,
        ..
    } = *problem;
    let threshold = dropout.threshold();
    let kept = threshold.kept_scale();
    let mut factors = Vec::with_capacity(batch * q_heads * q_len * kv_len);
    for plane in 0..(batch * q_heads) as u32 {
        let own = head_key(dropout.seed, plane);
        for query in 0..q_len as u32 {
            factors.extend((0..kv_len as u32).map(
                |key| match threshold.keeps(bits(own, query, key)) {
                    true => kept,
                    false => 0.0,
                },
            ));
        }
    }
    let data = TensorData::new(factors, [batch, q_heads, q_len, kv_len]);
    B::float_from_data(data.convert_dtype(logsumexp_dtype(problem)), device)
}
