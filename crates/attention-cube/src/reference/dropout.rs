//! The dropout factors of the reference implementation, drawn on the host.

use super::block::Block;
use crate::math::dropout::{bits, head_key};
use crate::options::Dropout;
use crate::types::tensors::logsumexp_dtype;
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::TensorData;

/// Returns the factors, `[batch, q_heads, q_len, kv_len]`, by which dropout multiplies a block's probabilities. The
/// factor of a dropped probability is 0. All kept probabilities have one factor, which preserves the mean.
pub(crate) fn factors<B: Backend>(dropout: &Dropout, block: &Block<B>) -> FloatTensor<B> {
    let (problem, place) = (&block.problem, block.place);
    let [batch, q_heads, q_len] = problem.logsumexp_shape();
    let kv_len = problem.kv_len;
    let indices = |first: usize, count: usize| first as u32..(first + count) as u32;
    let threshold = dropout.threshold();
    let kept = threshold.kept_scale();
    let mut factors = Vec::with_capacity(batch * q_heads * q_len * kv_len);
    for sequence in indices(place.sequence, batch) {
        for head in indices(place.q_head, q_heads) {
            let own = head_key(dropout.seed, sequence * place.q_heads as u32 + head);
            for query in indices(place.query, q_len) {
                factors.extend(indices(place.key, kv_len).map(|key| {
                    match threshold.keeps(bits(own, query, key)) {
                        true => kept,
                        false => 0.0,
                    }
                }));
            }
        }
    }
    let data = TensorData::new(factors, [batch, q_heads, q_len, kv_len]);
    let device = block.inputs.query.device();
    B::float_from_data(data.convert_dtype(logsumexp_dtype(problem)), &device)
}
