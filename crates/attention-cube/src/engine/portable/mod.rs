//! The portable engines. They share the kernels of `common`, and differ in the hardware that computes the GEMMs. The `unit`
//! engine uses scalar units, and the `cmma` engine uses CubeCL's matrix instruction.

pub mod cmma;
pub mod common;
pub mod unit;
