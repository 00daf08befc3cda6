//! Fused attention for [Burn](https://burn.dev), forward and backward, written once in
//! [CubeCL](https://github.com/tracel-ai/cubecl). One operator has every option and serves any head size from 1 to
//! 1024. The memory that the operator needs grows linearly with the sequence length.
//!
//! ```
//! use attention_cube::{AttentionOptions, fused_attention};
//! use burn::tensor::{Device, Distribution, Tensor};
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex(); // or Device::cuda(0), Device::vulkan(..), Device::wgpu(..)
//! let random = |heads| Tensor::<4>::random([1, heads, 32, 64], Distribution::Default, &device);
//! let (query, key, value) = (random(8), random(2), random(2)); // 4 query heads share a key head
//! let output = fused_attention(query, key, value, AttentionOptions::new().causal());
//! assert_eq!(output.dims(), [1, 8, 32, 64]);
//! # }
//! ```
//!
//! # Contract
//! `query [batch, q_heads, q_len, head_dim]`, `key [batch, kv_heads, kv_len, head_dim]`,
//! `value [batch, kv_heads, kv_len, value_dim]` → `[batch, q_heads, q_len, value_dim]`. Query head `h` reads key head
//! `h / (q_heads / kv_heads)` (GQA). The operator supports f32, f16 and bf16, if the device supports the dtype. For f64
//! inputs, the engine [`Blocks`](Engine::Blocks) computes in f64.
//!
//! Except for f64 inputs, the scores, the softmax and all sums are f32. The operations on a score are, in order: scale,
//! softcap, [score mod](score_mod), bias, masking (causal mask, window, lengths, segments, intervals, mask, block
//! mask), sink (if any) and softmax. The probabilities are then multiplied with the values, and the output is rounded
//! to the input's dtype.
//!
//! | case | result |
//! |---|---|
//! | a query that sees no key | output 0, gradients 0, logsumexp −∞ (with sinks, the logsumexp is the head's sink); never NaN |
//! | NaN or infinity in keys or values that no query sees | never reaches output or gradients |
//! | NaN or infinity in keys or values that some queries see | may reach other queries of the same query head, and queries of other query heads that read the same key head; never reaches a query that sees no key |
//! | a bias of −∞ | hides its key |
//! | a bias equal to the dtype's lowest finite number | is added to the score like any other bias |
//! | scores of any magnitude | as exact as f32 scores |
//! | elements of V beyond `f32::MAX / (256 · kv_len)` | may give an infinite output, because kernels sum the weighted rows of V before they divide by row_sum |
//! | a sink of −∞ | same as no sink |
//! | contiguous, permuted, sliced or broadcast (stride 0) inputs of any size | same result. Inputs that TMA or another hardware copy cannot read are first copied to contiguous tensors. The debug log of a call lists these copies; [`explain`] assumes contiguous inputs |
//! | f16 with scale 1 and a large head size | finite: scores never pass through f16 |
//! | f16 gradients on matrix units (wgmma, mma, and cmma with f16 operands) | kernels round the score gradients `P ∘ (dP − Δ)` to f16. Beyond 65,504 the gradients of query and keys become infinite, even if their own values would fit f16; [`explain`] warns |
//! | a shape, dtype, device or checkpointing strategy that does not fit | [`AttentionError`] naming the argument |
//! | a device or a problem that a kernel cannot serve | the next kernel in order serves it; [`explain`] gives that kernel and the reason for each refusal |
//!
//! The module [`quantized`] is for keys and values in int8 or e4m3. The module [`varlen`] is for packed sequences, and
//! [`paged`] for keys and values in pages. The module [`nn`] has the attention modules of `burn-nn` with fused
//! attention.
//!
//! Gradients are first-order. Gradients flow from the output and the logsumexp to the query, the keys, the values, the
//! bias, the sinks and the table of a [learned score mod](AttentionOptions::learned_score_mod). Both checkpointing
//! strategies of Burn's autodiff are supported.

#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]
#![cfg_attr(
    not(feature = "internals"),
    allow(
        dead_code,
        unused_imports,
        reason = "tests and benchmarks reach these items through the feature `internals`, with which the lints hold"
    )
)]

mod auxiliary;
mod backend;
mod block_mask;
mod blocks;
mod call;
mod device;
mod engine;
mod error;
mod explain;
mod integers;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
#[cfg(feature = "cube")]
mod kernel_args;
mod math;
pub mod nn;
mod options;
pub mod paged;
mod problem;
pub mod quantized;
pub mod reference;
pub mod score_mod;
mod select;
#[cfg(feature = "cube")]
mod self_check;
pub mod shards;
#[cfg(all(test, any(feature = "cuda", feature = "rocm")))]
mod source;
#[cfg(test)]
mod testing;
mod tile_ops;
mod types;
pub mod varlen;

pub use block_mask::BlockMask;
pub use engine::Kernel;
pub use error::AttentionError;
pub use explain::{Explanation, explain};
pub use options::{AttentionOptions, CausalAlignment, Dropout};
pub use problem::{AttentionProblem, MAX_HEAD_DIM};
pub use select::Selection;
pub use types::device::DeviceProfile;
pub use types::engine::Engine;
pub use types::refusal::{Feature, Refusal, Warning};

use burn::tensor::Tensor;
use call::{attend, compute_output};

/// Computes attention by the fastest kernel that serves the problem on the tensors' device.
///
/// The [crate's documentation](crate) states the contract.
///
/// # Shapes
/// `query [batch, q_heads, q_len, head_dim]`, `key [batch, kv_heads, kv_len, head_dim]`,
/// `value [batch, kv_heads, kv_len, value_dim]` → `[batch, q_heads, q_len, value_dim]`, all of one float dtype.
///
/// # Panics
/// Panics with the text of [`AttentionError`] if an argument is invalid, as Burn's operators do.
/// [`try_fused_attention`] returns the error instead.
pub fn fused_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Tensor<4> {
    match try_fused_attention(query, key, value, options) {
        Ok(output) => output,
        Err(error) => panic!("fused_attention: {error}"),
    }
}

/// Computes the result of [`fused_attention`]. If an argument is invalid, this function returns an error instead of
/// panicking.
///
/// # Shapes
/// The inputs and the output have the shapes of [`fused_attention`].
///
/// # Errors
/// Returns [`AttentionError`] if an argument is invalid.
pub fn try_fused_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    compute_output(query, key, value, options)
}

/// Computes the result of [`fused_attention`], and the logsumexp (LSE) of every query's scores. The LSE is a natural
/// logarithm. Its dtype is f32, or f64 for f64 inputs.
///
/// Both results are differentiable. From outputs and logsumexps of the same queries over different keys,
/// [`shards::merge`] computes the result over all these keys.
///
/// # Shapes
/// The inputs and the output have the shapes of [`fused_attention`]; the logsumexp is `[batch, q_heads, q_len]`.
///
/// ```
/// use attention_cube::{AttentionOptions, attention_with_lse};
/// use burn::tensor::{Device, Distribution, Tensor};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex();
/// let random = |length| Tensor::<4>::random([1, 2, length, 16], Distribution::Default, &device);
/// let (output, lse) =
///     attention_with_lse(random(3), random(5), random(5), AttentionOptions::new())?;
/// assert_eq!((output.dims(), lse.dims()), ([1, 2, 3, 16], [1, 2, 3]));
/// # }
/// # Ok::<(), attention_cube::AttentionError>(())
/// ```
///
/// # Errors
/// Returns [`AttentionError`] if an argument is invalid.
pub fn attention_with_lse(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let (result, problem) = attend(query, key, value, options)?;
    Ok(reference::output_and_lse(result, &problem))
}
