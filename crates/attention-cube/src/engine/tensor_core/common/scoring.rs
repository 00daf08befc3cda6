//! The kernel arguments for the computation of scores. The module also defines the operands of kernels that load
//! operands through pointers instead of TMA.

use crate::auxiliary::mask_bits::kernel::MaskOffsets;
use crate::math::dropout::kernel::DropoutArguments;
use crate::math::schedule::Grid;
use crate::math::score::ScoreArguments;
use crate::math::score_mod::kernel::KernelTables;
use crate::math::visibility::SeqLens;
use cubecl::prelude::*;

/// The inputs that decide which keys are hidden from a query.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Masking {
    pub seq_lens: SeqLens,
    /// The sequence lengths, the segment ids, the key intervals of the queries, and the bounds of each block, packed in
    /// one tensor. A block's bounds are two ranges. The first is the range of the block's segment ids. The second, for
    /// a block of queries, is the range of key blocks that segments and intervals may leave visible. For a block of
    /// keys, the second is the same kind of range over query blocks.
    pub lengths_and_ids: ComptimeOption<OwnedTensor<i32>>,
    /// The mask bits, and one summary for each tile and block. The summary tells whether the mask shows the tile all,
    /// some or none of the block.
    pub mask: ComptimeOption<OwnedTensor<u32>>,
    pub mask_offsets: MaskOffsets,
}

/// The inputs that turn dot products `q·k` into scores: masking, bias, scale, softcap, and the tables of score mod and mask
/// mod.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Scoring<F: Float, NB: Size> {
    pub masking: Masking,
    pub bias: ComptimeOption<OwnedTensor<Vector<F, NB>>>,
    pub arguments: ScoreArguments,
    pub dropout: ComptimeOption<DropoutArguments>,
    pub tables: KernelTables,
}

/// Q, K, V and the scales of quantized K and V, for a kernel that loads these tensors through pointers instead of TMA.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ForwardOperands<E: Float, W: Numeric> {
    /// The query, `[batch, q_heads, q_len, head_dim]`.
    pub query: OwnedTensor<E>,
    /// The key, `[batch, kv_heads, kv_len, head_dim]`. A quantized K packs four 8-bit codes in a `u32`.
    pub key: OwnedTensor<W>,
    /// The value, `[batch, kv_heads, kv_len, value_dim]`. A quantized V packs four 8-bit codes in a `u32`.
    pub value: OwnedTensor<W>,
    /// The scale of each row of a quantized K, `[batch, kv_heads, kv_len]`.
    pub key_scales: ComptimeOption<OwnedTensor<f32>>,
    /// The scale of each row of a quantized V, `[batch, kv_heads, kv_len]`.
    pub value_scales: ComptimeOption<OwnedTensor<f32>>,
    /// The page table, `[batch, pages of a sequence]`. Entry `n` of a sequence is the index of the page whose first key
    /// is key `n · page_len` of the sequence. With a page table, the first dimension of K, V and their scales is the
    /// page, and the third is the key within the page.
    pub page_table: ComptimeOption<OwnedTensor<i32>>,
}

/// The tensors that a gradient kernel loads through pointers. A CTA keeps a stationary tile of queries and streams
/// blocks of keys, or keeps a tile of keys and streams blocks of queries. Each field's comment gives the tensor for a
/// tile of queries and the tensor for a tile of keys.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct GradientOperands<E: Float> {
    /// The operand of S = Q Kᵀ whose rows the stationary tile holds: Q for a tile of queries, K for a tile of keys.
    pub stationary_qk: OwnedTensor<E>,
    /// The operand of dP = dO Vᵀ whose rows the stationary tile holds: dO for a tile of queries, V for a tile of keys.
    pub stationary_v_do: OwnedTensor<E>,
    /// The operand of S = Q Kᵀ that the CTA streams in blocks: K for a tile of queries, Q for a tile of keys.
    pub q_or_k: OwnedTensor<E>,
    /// The operand of dP = dO Vᵀ that the CTA streams in blocks: V for a tile of queries, dO for a tile of keys.
    pub v_or_do: OwnedTensor<E>,
    /// The LSE and delta of each query, `[batch, q_heads, 5, padded q_len]`. `auxiliary/delta/kernel.rs` lists the five
    /// rows.
    pub lse_delta: OwnedTensor<f32>,
}

/// The launch grid of a gradient kernel's tiles.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct GradientGrid {
    pub grid: Grid,
    /// The number of query heads per KV head (the GQA group size).
    pub group: u32,
}
