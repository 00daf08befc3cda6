//! Tensor cores and asynchronous copies of NVIDIA GPUs of sm_80 (Ampere) or later: `mma.sync`, `ldmatrix` and
//! `cp.async`.
//!
//! Operands of attention lie in shared memory as subtiles of 64 columns, with the 128-byte swizzle of [`hopper`](crate::hopper).
//! This swizzle permutes the eight 16-byte pieces of each row, and the permutation depends on the row's index. The
//! swizzle avoids bank conflicts of `cp.async` and `ldmatrix`.

#![allow(
    missing_docs,
    reason = "CubeCL's macros generate public items without docs"
)]

#[cfg(feature = "cuda")]
pub mod code_operand;
#[cfg(feature = "cuda")]
pub mod cp_async;
#[cfg(feature = "cuda")]
pub mod exchange;
#[cfg(feature = "cuda")]
pub mod gemm;
#[cfg(feature = "cuda")]
pub mod gemv;
#[cfg(feature = "cuda")]
pub mod mma;

#[cfg(feature = "cuda")]
use crate::nvidia::Half;
#[cfg(feature = "cuda")]
use cubecl::{
    client::Client,
    ir::{FloatKind, features::MmaConfig},
};

/// True if the device has warps of 32 threads, and `mma.sync` of 16 × 8 × 16 in this precision.
#[cfg(feature = "cuda")]
pub fn has_product(client: &Client, half: Half) -> bool {
    let element = match half {
        Half::F16 => FloatKind::F16,
        Half::Bf16 => FloatKind::BF16,
    };
    let product = MmaConfig {
        a_type: element.into(),
        b_type: element.into(),
        cd_type: FloatKind::F32.into(),
        m: 16,
        n: 8,
        k: 16,
    };
    let properties = client.properties();
    properties.hardware.plane_size_max == 32 && properties.features.matmul.mma.contains(&product)
}

/// The number of rows of the left operand of `mma.sync`, which is also the number of rows of an accumulator fragment.
pub const FRAGMENT_ROWS: usize = 16;

/// The size and alignment of an mbarrier in shared memory, in bytes.
pub const BARRIER_BYTES: usize = 8;
