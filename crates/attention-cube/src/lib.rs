//! Fused attention for [Burn](https://burn.dev), forward and backward, written once in
//! [CubeCL](https://github.com/tracel-ai/cubecl): any head size from 1 to 1024, every option in one
//! operator, memory linear in the sequence length, on every device that Burn's CubeCL backend reaches.
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
//! `value [batch, kv_heads, kv_len, value_dim]` → `[batch, q_heads, q_len, value_dim]`. Query head `h`
//! reads key head `h / (q_heads / kv_heads)`. f32, f16 and bf16, where the device has them; f64 where
//! the device runs the [reference](mod@reference).
//!
//! Scores are f32, whatever the inputs: × scale → softcap → + bias → visibility → (sink) → softmax in
//! f32 → values, accumulated in f32 → the input's dtype.
//!
//! | case | result |
//! |---|---|
//! | a query that sees no key | output 0, gradients 0, logsumexp −∞ (with a sink: the sink); never NaN |
//! | NaN or infinity in keys or values that no query sees | never reaches output or gradients |
//! | NaN or infinity in keys or values that some queries see | may reach others of their head and those that share its keys; never one that sees no key |
//! | a bias of −∞; of a precision's lowest number | hides its key; is a score like others |
//! | scores of any size | as exact as their own f32: the gradients have reference and logarithm of a logsumexp apart |
//! | values beyond `f32::MAX / (256 · kv_len)` | may give an infinite output: kernels sum the values before they divide by the softmax's denominator |
//! | a sink of −∞ | none |
//! | inputs of any width, permuted, sliced, broadcast with stride 0 | read through their strides, or copied first where copies by hardware cannot read them (the debug log of a call says which; [`explain`] is about contiguous inputs); same result |
//! | f16 with scale 1 and a large head size | finite: scores never pass through f16 |
//! | f16 gradients, by matrix units (wgmma, mma, and cmma where it multiplies f16) | the gradients of the scores, `P ∘ (dP − Δ)`, are f16 there: beyond 65,504 the gradients of query and keys are infinite even if they would fit; [`explain`] warns |
//! | shapes, dtypes, devices, strategies of checkpointing that do not fit | [`AttentionError`] naming the argument |
//! | a device or a problem that a kernel cannot serve | the next one takes it; [`explain`] says which and why |
//!
//! Keys and values in int8 have a [module](quantized) of their own.
//!
//! Gradients are first-order, of the query, the keys, the values, the bias and the sinks, through
//! output and logsumexp, with Burn's autodiff and both of its checkpointing strategies. For inputs
//! that are not tracked nothing is computed.

#![warn(missing_docs, clippy::undocumented_unsafe_blocks)]

#[cfg(feature = "cube")]
mod arguments;
mod backend;
pub mod device;
pub mod division;
pub mod engine;
mod error;
mod explain;
#[cfg(feature = "cuda")]
mod fragment;
mod math;
mod options;
pub mod passes;
mod problem;
pub mod quantized;
pub mod reference;
#[cfg(feature = "cube")]
mod restriction;
pub mod select;
#[cfg(all(test, any(feature = "cuda", feature = "rocm")))]
mod source;
#[cfg(test)]
mod testing;
pub mod tile;
pub mod tiled;

pub use error::AttentionError;
pub use explain::{Explanation, explain};
pub use math::side::Side;
pub use options::{AttentionOptions, CausalAlignment};
pub use problem::{AttentionProblem, MAX_HEAD_DIM};

use backend::{AttentionBackend, AttentionInputs, AttentionOutput};
use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// Attention, by the fastest kernel that serves the problem on the tensors' device.
///
/// The contract is in the [crate's documentation](crate).
///
/// # Panics
/// With the text of [`AttentionError`] where an argument does not fit, as Burn's operators do;
/// [`try_fused_attention`] returns it instead.
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

/// [`fused_attention`], with an error instead of a panic.
///
/// # Errors
/// [`AttentionError`] where an argument does not fit.
pub fn try_fused_attention(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<Tensor<4>, AttentionError> {
    let (result, _) = attend(query, key, value, options)?;
    Ok(Tensor::from_dispatch(result.output))
}

/// [`fused_attention`] and the logsumexp of every query's scores, `[batch, q_heads, q_len]` in f32,
/// natural logarithm; both differentiable. Two attentions over different keys merge by it.
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
/// [`AttentionError`] where an argument does not fit.
pub fn attention_with_lse(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<(Tensor<4>, Tensor<3>), AttentionError> {
    let (result, problem) = attend(query, key, value, options)?;
    let logsumexp = reference::logsumexp_of_parts::<Dispatch>(result.logsumexp, &problem);
    Ok((
        Tensor::from_dispatch(result.output),
        Tensor::from_dispatch(logsumexp),
    ))
}

/// The operator's results, with the logsumexp in parts, and what it was asked.
fn attend(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> Result<(AttentionOutput<Dispatch>, AttentionProblem), AttentionError> {
    let problem = AttentionProblem::new(&query, &key, &value, &options)?;
    backend::check_backend(&query.device())?;
    let inputs = inputs(query, key, value, options);
    Ok((
        Dispatch::attention_forward(inputs, problem.clone()),
        problem,
    ))
}

/// The tensors of a call, as Burn's dispatch takes them.
fn inputs(
    query: Tensor<4>,
    key: Tensor<4>,
    value: Tensor<4>,
    options: AttentionOptions,
) -> AttentionInputs<Dispatch> {
    let (query_segments, key_segments) = options.segments.unzip();
    AttentionInputs {
        query: query.into_dispatch(),
        key: key.into_dispatch(),
        value: value.into_dispatch(),
        mask: options.mask.map(Tensor::into_dispatch).into(),
        bias: options.bias.map(Tensor::into_dispatch).into(),
        kv_lengths: options.kv_lengths.map(Tensor::into_dispatch).into(),
        query_segments: query_segments.map(Tensor::into_dispatch).into(),
        key_segments: key_segments.map(Tensor::into_dispatch).into(),
        sinks: options.sinks.map(Tensor::into_dispatch).into(),
    }
}
