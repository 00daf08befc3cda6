//! The backward, in kernels without atomics, so that gradients are the same bit by bit in every run.
//!
//! With `p = exp(score − lse)`, `dp = do·vᵀ`, `Δ = rowsum(do ∘ o) − dlse` and `ds = p ∘ (dp − Δ)`
//! (FlashAttention-2, Dao 2023, algorithm 2):
//!
//! | kernel | stationary | products a pair of tiles | gives |
//! |---|---|---|---|
//! | `rows` | | | lse and Δ of every query |
//! | `query` | queries | S, dP, dQ | `dq = Σ ds k` |
//! | `key_value` | keys | S, dP, dV, dK | `dv = Σ pᵀ do`, `dk = Σ dsᵀ q`, summed over the heads of a group |
//! | `together` | keys | S, dP, dV, dK, dQ | all three, where few cubes are enough |
//! | `bias` | scores | S, dP | `dbias = Σ ds` over what the bias is broadcast along |
//! | `constant_bias` | | | the same where that is all keys |
//!
//!
//! Those of the wgmma engine, `by_rows` and `by_columns`, hold either side: queries, keys, or keys twice, once for
//! each of their gradients.
//!
//! Two kernels instead of one recompute S and dP: 7 products where 5 would do with atomic additions to dQ,
//! which are neither deterministic nor on every device, and were the bound where they were measured.

pub(crate) mod bias;
#[cfg(feature = "cuda")]
pub(crate) mod by_columns;
#[cfg(feature = "cuda")]
pub(crate) mod by_rows;
pub(crate) mod constant_bias;
#[cfg(feature = "cuda")]
pub(crate) mod held;
pub(crate) mod key_value;
pub(crate) mod query;
pub(crate) mod rows;
pub(crate) mod together;
#[cfg(feature = "cuda")]
pub(crate) mod weights;

use super::score::{Place, ScoreArguments, ScoreKind, biased, capped, probability, slope};
use super::visibility::Structure;
use crate::plan::unit::UnitTiles;
use cubecl::prelude::*;

/// What a backward kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BackwardKind {
    pub tiles: UnitTiles,
    pub structure: Structure,
    pub score: ScoreKind,
}

/// The derivatives at one score.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreGradient {
    /// The probability.
    pub p: f32,
    /// `d loss / d score`, after bias and softcap: the bias's gradient.
    pub ds: f32,
    /// `d loss / d (q·k)`.
    pub ddot: f32,
}

/// The derivatives where the query sees the key; zeros elsewhere, whatever the numbers are.
#[cube]
pub(crate) fn score_gradient<F: Float>(
    dot: f32,
    dp: f32,
    terms: RowTerms,
    visible: bool,
    bias: &ComptimeOption<&Tensor<F>>,
    place: &Place,
    arguments: &ScoreArguments,
    #[comptime] kind: ScoreKind,
) -> ScoreGradient {
    let mut p = 0.0f32;
    let mut ds = 0.0f32;
    let mut ddot = 0.0f32;
    if visible {
        let capped = capped(dot, arguments, kind);
        let score = biased(capped, bias, place, arguments.negative_infinity);
        p = probability(score, terms.reference, terms.logarithm);
        if p != 0.0f32 {
            ds = p * (dp - terms.delta);
            ddot = ds * slope(capped, arguments, kind);
        }
    }
    ScoreGradient { p, ds, ddot }
}

/// What `rows` leaves of a query, in `[batch, q_heads, 3, padded q_len]`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowTerms {
    pub reference: f32,
    pub delta: f32,
    /// Of the sum by the reference.
    pub logarithm: f32,
}

/// A query's terms; zeros where there is no such query.
#[cube]
pub(crate) fn row_terms_of(
    rows: &Tensor<f32>,
    batch: u32,
    head: u32,
    query: i32,
    q_len: i32,
) -> RowTerms {
    let mut reference = 0.0f32;
    let mut delta = 0.0f32;
    let mut logarithm = 0.0f32;
    if query < q_len {
        let at = batch as usize * rows.stride(0) + head as usize * rows.stride(1) + query as usize;
        reference = rows[at];
        delta = rows[at + rows.stride(2)];
        logarithm = rows[at + 2 * rows.stride(2)];
    }
    RowTerms {
        reference,
        delta,
        logarithm,
    }
}
