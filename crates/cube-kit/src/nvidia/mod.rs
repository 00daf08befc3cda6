//! Code that all tensor-core architectures of NVIDIA share: half precisions, the swizzled layout in shared memory,
//! accumulator registers, mbarriers, and PTX helpers.

#![allow(
    missing_docs,
    reason = "CubeCL's macros generate public items without docs"
)]

#[cfg(feature = "cuda")]
pub mod accumulator;
pub mod matrix;
#[cfg(feature = "cuda")]
pub mod mbarrier;
#[cfg(feature = "cuda")]
pub mod ptx;

use burn::tensor::DType;

/// The half-precision types that tensor cores support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE half precision (f16).
    F16,
    /// The bfloat16 format (bf16).
    Bf16,
}

impl Half {
    /// Returns the name of the precision in PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Returns the half-precision type of a dtype, or `None` if the dtype is neither f16 nor bf16.
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }
}

/// The number of bytes in a row of a subtile. A row has 64 half-precision elements. The 128-byte swizzle permutes the
/// 16-byte pieces of the row.
pub const ROW_BYTES: usize = 128;

/// The number of columns per subtile.
pub const SUBTILE: usize = 64;

/// True if rows of `columns` columns consist of whole 64-column subtiles. One TMA box can then contain several subtiles
/// of a row.
pub const fn is_whole(columns: usize) -> bool {
    columns.is_multiple_of(SUBTILE)
}

/// Returns the number of registers in a register vector that has room for `used` registers: the next power of two.
pub const fn registers(used: usize) -> usize {
    used.next_power_of_two()
}
