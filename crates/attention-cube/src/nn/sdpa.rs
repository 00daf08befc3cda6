//! Scaled dot-product attention as one function call.

use crate::call::compute_output;
use crate::error::AttentionError;
use crate::options::AttentionOptions;
use burn::tensor::{Bool, Tensor};

/// Computes scaled dot-product attention with the scale `1/√head_dim`.
///
/// In the mask, **`true` makes a key visible**, as in PyTorch. The causal mask is aligned at the bottom right: the last
/// query sees the last key. PyTorch's `is_causal` is aligned at the top left. [`AttentionOptions`](crate::AttentionOptions)
/// has all other options.
///
/// # Shapes
/// `query [batch, q_heads, q_len, head_dim]`, `key [batch, kv_heads, kv_len, head_dim]`,
/// `value [batch, kv_heads, kv_len, value_dim]` → `[batch, q_heads, q_len, value_dim]`. All four tensors have the same
/// float dtype. `kv_heads` divides `q_heads` (GQA). The mask is `[batch, q_heads, q_len, kv_len]`, where a dimension of
/// size 1 is broadcast.
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit.
///
/// ```
/// use attention_cube::nn::sdpa;
/// use burn::tensor::{Device, Distribution, Tensor};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let random = |heads| Tensor::<4>::random([1, heads, 10, 16], Distribution::Default, &device);
/// let output = sdpa(random(4), random(2), random(2), None, true)?;
/// assert_eq!(output.dims(), [1, 4, 10, 16]);
/// # }
/// # Ok::<(), attention_cube::AttentionError>(())
/// ```
pub fn sdpa(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
    causal: bool,
) -> Result<Tensor<4>, AttentionError> {
    let mut options = AttentionOptions::new();
    if let Some(mask) = mask {
        options = options.mask(mask);
    }
    if causal {
        options = options.causal();
    }
    compute_output(query, key, value, options)
}
