//! The tensors and sizes that tile kernels receive as grouped arguments.

use cubecl::prelude::*;

/// Q, K and V of a forward pass, and the scales of quantized K and V.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ForwardInputs<E: Float, K: Numeric, N: Size, W: Size> {
    /// Q, `[batch, q_heads, q_len, head_dim]`.
    pub query: OwnedTensor<Vector<E, N>>,
    /// K, `[batch, kv_heads, kv_len, head_dim]`. If K is quantized, each word of the tensor holds four codes.
    pub key: OwnedTensor<Vector<K, W>>,
    /// V, `[batch, kv_heads, kv_len, value_dim]`. If V is quantized, each word of the tensor holds four codes.
    pub value: OwnedTensor<Vector<K, W>>,
    /// The scales of a quantized K, one per row: `[batch, kv_heads, kv_len]`.
    pub key_scales: ComptimeOption<OwnedTensor<f32>>,
    /// The scales of a quantized V, one per row: `[batch, kv_heads, kv_len]`.
    pub value_scales: ComptimeOption<OwnedTensor<f32>>,
    /// The page table, `[batch, pages of a sequence]`. Entry `n` is the index of the page with the sequence's keys
    /// `n · page_len` to `(n + 1) · page_len − 1`. With a page table, K and V are
    /// `[pages, kv_heads, page_len, columns]`.
    pub page_table: ComptimeOption<OwnedTensor<i32>>,
}

/// The tensors that a gradient kernel reads.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct BackwardInputs<E: Float, N: Size> {
    /// Q, `[batch, q_heads, q_len, head_dim]`.
    pub query: OwnedTensor<Vector<E, N>>,
    /// K, `[batch, kv_heads, kv_len, head_dim]`.
    pub key: OwnedTensor<Vector<E, N>>,
    /// V, `[batch, kv_heads, kv_len, value_dim]`.
    pub value: OwnedTensor<Vector<E, N>>,
    /// The gradient of the output, `[batch, q_heads, q_len, value_dim]`.
    pub output_gradient: OwnedTensor<Vector<E, N>>,
    /// The LSE/delta tensor, `[batch, q_heads, 5, padded q_len]` in f32. `auxiliary/delta/kernel.rs` describes the five
    /// rows.
    pub lse_delta: OwnedTensor<f32>,
}

/// The head sizes of a problem, and the number of query heads per KV head.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct HeadSizes {
    /// The number of query heads per KV head (the GQA group size).
    pub group: u32,
    /// The number of columns of queries and keys.
    pub head_dim: u32,
    /// The number of columns of values.
    pub value_dim: u32,
}
