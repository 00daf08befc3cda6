//! The portable engines. They share the kernels of `common`, and differ in the hardware that computes the GEMMs. The `unit`
//! engine uses scalar units, and the `cmma` engine uses matrix units through `cubecl::cmma`.

pub mod cmma;
pub mod common;
pub mod unit;
