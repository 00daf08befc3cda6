//! The backward, in kernels without atomics, so that gradients are the same bit by bit in every run.
//!
//! With `p = exp(score − lse)`, `dp = do·vᵀ`, `Δ = rowsum(do ∘ o) − dlse` and `ds = p ∘ (dp − Δ)`
//! (FlashAttention-2, Dao 2023, algorithm 2):
//!
//! | kernel | stationary | products a pair of tiles | gives |
//! |---|---|---|---|
//! //! | `query` | queries | S, dP, dQ | `dq = Σ ds k` |
//! | `key_value` | keys | S, dP, dV, dK | `dv = Σ pᵀ do`, `dk = Σ dsᵀ q`, summed over the heads of a group |
//! | `together` | keys | S, dP, dV, dK, dQ | all three, where few cubes are enough |
//!
//! Two kernels instead of one recompute S and dP: 7 products where 5 would do with atomic additions to dQ,
//! which are neither deterministic nor on every device, and were the bound where they were measured.

pub(crate) mod key_value;
pub(crate) mod query;
pub(crate) mod together;
