//! GEMM in f16 and bf16 on NVIDIA GPUs since Ampere, with `mma.sync`, `ldmatrix` and `cp.async`.

mod kernel;
mod launch;
mod operand;
mod plan;
mod reduce;

pub use launch::matrix_product;
