//! What kernels stand on that are not attention's alone: launches, Hopper's instructions, matrix products.

pub(crate) mod hopper;
#[cfg(feature = "cube")]
pub(crate) mod launch;
pub mod matmul;
