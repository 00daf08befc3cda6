//! GEMM in f16 and bf16 on Hopper.

#[cfg(feature = "cuda")]
mod grouped;
#[cfg(feature = "cuda")]
mod grouped_launch;
#[cfg(feature = "cuda")]
mod kernel;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
pub mod mainloop;
#[cfg(feature = "cuda")]
mod operand;
pub mod plan;
#[cfg(feature = "cuda")]
pub mod ring;

#[cfg(feature = "cuda")]
pub use grouped_launch::{grouped_inner, grouped_rows};
#[cfg(feature = "cuda")]
pub use launch::{matrix_product, matrix_products, multiplies_side_by_side};
