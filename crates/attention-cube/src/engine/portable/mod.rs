//! The portable engines, which share the kernels of `common`. The `unit` engine computes GEMMs on scalar units, and the
//! `cmma` engine on matrix units through `cubecl::cmma`.

pub mod cmma;
pub mod common;
pub mod unit;
