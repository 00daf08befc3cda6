//! The backward kernels. They use no atomics, so gradients are bitwise equal in every run.
//!
//! The formulas (FlashAttention-2, Dao 2023, algorithm 2) are `p = exp(score − lse)`, `dp = do·vᵀ`,
//! `Δ = rowsum(do ∘ o) − dlse` and `ds = p ∘ (dp − Δ)`. Here `o` is the output, and a leading `d` marks a gradient.
//!
//! | kernel | rows that a tile keeps | GEMMs per pair of tiles | result |
//! |---|---|---|---|
//! | `query` | queries | S, dP, dQ | `dq = Σ ds k` |
//! | `key_value` | keys | S, dP, dV, dK | `dv = Σ pᵀ do`, `dk = Σ dsᵀ q`, summed over the heads of a group |
//! | `fused` | keys | S, dP, dV, dK, dQ | all three gradients, on software drivers |
//!
//! The kernels `query` and `key_value` both compute S and dP, so there are 7 GEMMs instead of 5. With 5 GEMMs on many cubes,
//! dQ would need atomic additions. Atomics are not deterministic and not available on every device.

pub(crate) mod fused;
pub(crate) mod key_value;
mod p_ds;
pub(crate) mod query;
