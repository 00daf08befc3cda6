//! The floating-point operations that a training step has to do, to compare rows that do different work.

use crate::parts::{attention_kinds, matrix_kinds};
use burn_gemma4::Gemma4Model;

/// Operations of a multiplication and an addition.
const MULTIPLY_ADD: f64 = 2.0;

/// Attention's backward multiplies 2.5 times as much as its forward.
const ATTENTION_PASSES: f64 = 3.5;

/// Counts the products and attention of a step over `[batch, length]` tokens with the loss on the `last` positions.
///
/// Recomputation, norms and activations are not counted. A frozen weight has no gradient: two products for three.
/// `None` for a mixture of experts, whose products depend on the router's choices.
pub fn flops(
    model: &Gemma4Model,
    [batch, length, last]: [usize; 3],
    is_frozen: bool,
) -> Option<f64> {
    let config = model.config();
    if config.experts.is_some() {
        return None;
    }
    let passes = if is_frozen { 2.0 } else { 3.0 };
    let matrices: usize = matrix_kinds(model, [batch * length, batch * last])
        .into_iter()
        .map(|([rows, columns, written], (_, count))| rows * columns * written * count)
        .sum();
    let head = batch * last * config.hidden_size * config.vocab_size;
    let attention: f64 = attention_kinds(config, [length, last])
        .into_iter()
        .map(|(kind, (layer, count))| {
            let (queries, window) = (kind.queries, kind.window(config));
            let pairs: usize = (length - queries..length)
                .map(|query| (query + 1).min(window))
                .sum();
            let heads = batch * config.num_attention_heads;
            2.0 * (count * heads * pairs * config.head_dim(layer)) as f64
        })
        .sum();
    let products = passes * (matrices + head) as f64;
    Some(MULTIPLY_ADD * (products + ATTENTION_PASSES * attention))
}
