//! Hopper: what its matrix unit and its copy engine (TMA) read and write, and the instructions for them.

#![allow(
    missing_docs,
    reason = "CubeCL's macros make public items beside those that are documented here"
)]

#[cfg(feature = "cuda")]
pub mod accumulator;
#[cfg(feature = "cuda")]
pub mod barriers;
#[cfg(feature = "cuda")]
pub mod pipeline;
#[cfg(feature = "cuda")]
pub mod ptx;
#[cfg(feature = "cuda")]
pub mod tma;
#[cfg(feature = "cuda")]
pub mod wgmma;

use burn::tensor::DType;
#[cfg(feature = "cube")]
use cubecl::{client::Client, ir::features::Tma};

/// Whether the device is of NVIDIA's Hopper (sm_90), and CubeCL compiles its kernels through CUDA C++.
#[cfg(feature = "cube")]
pub fn is_hopper(client: &Client) -> bool {
    let properties = client.properties();
    // The copy engine is reached through CUDA C++ alone; later architectures have other matrix units.
    cfg!(feature = "cuda")
        && properties.features.tma.contains(Tma::Base)
        && properties.identity.fingerprint == "ptx_sm90"
}

/// Multiprocessors assumed where the runtime does not say.
pub const ASSUMED_MULTIPROCESSORS: usize = 132;

/// The half precisions that the matrix unit multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Half {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl Half {
    /// Its name in PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }

    /// Of a dtype, if it is one of them.
    pub const fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F16 => Some(Self::F16),
            DType::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }
}

/// Bytes of a row of a subtile, 64 halves: what the 128-byte swizzle permutes.
pub const ROW_BYTES: usize = 128;

/// Columns of a subtile.
pub const SUBTILE: usize = 64;

/// Rows of one matrix product.
pub const PRODUCT_ROWS: usize = 64;

/// Threads of a warpgroup.
pub const WARPGROUP: usize = 128;

/// Whether rows of so many columns are whole subtiles, which the copy engine then brings by one box.
pub const fn is_whole(columns: usize) -> bool {
    columns.is_multiple_of(SUBTILE)
}

/// `left · rightᵀ`, both in shared memory in subtiles of their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreProduct {
    /// Columns of both, which are summed over.
    pub depth: usize,
    /// Rows of a subtile of the left operand.
    pub left_rows: usize,
    /// Rows of the right operand: columns of the product.
    pub right_rows: usize,
    /// The precision of the operands.
    pub half: Half,
}

impl ScoreProduct {
    /// Size of the product's vector of registers.
    pub const fn fragment(&self) -> usize {
        registers(self.right_rows / 2)
    }
}

/// `left · right`, the left operand in registers, the right one in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// Rows of the right operand, which are summed over.
    pub depth: usize,
    /// Columns of the product.
    pub columns: usize,
    /// The precision of the operands.
    pub half: Half,
}

impl Product {
    /// Sizes of the vectors of registers of the left operand, and of the product.
    pub const fn fragments(&self) -> [usize; 2] {
        [registers(self.depth / 4), registers(self.columns / 2)]
    }
}

/// A vector of registers has a power of two of them.
pub const fn registers(used: usize) -> usize {
    used.next_power_of_two()
}
