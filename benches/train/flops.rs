//! Counts the floating-point operations of a training step.

use crate::parts::{attention_kinds, matrix_kinds};
use burn_gemma4::Gemma4Model;

/// The number of floating-point operations in one multiply-add.
const MULTIPLY_ADD: f64 = 2.0;

/// The floating-point operations of attention's forward and backward together, relative to those of the forward. The
/// backward alone has 2.5 times as many operations as the forward.
const ATTENTION_PASSES: f64 = 3.5;

/// Returns the number of floating-point operations of the GEMMs and the attention in one training step with
/// `[batch, length]` tokens. The loss covers the last `last` positions of each sequence.
///
/// Recomputation, norms and activations are not counted. A trained weight has one GEMM in the forward and two in the
/// backward. A frozen weight has no GEMM for its own gradient.
///
/// Returns `None` for a mixture of experts.
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
