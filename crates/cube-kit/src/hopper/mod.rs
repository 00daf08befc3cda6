//! Hopper: the data layouts of its tensor cores and of its copy engine (TMA), and the instructions of both.

#![allow(
    missing_docs,
    reason = "CubeCL's macros generate public items without docs"
)]

#[cfg(feature = "cuda")]
pub mod barriers;
#[cfg(feature = "cuda")]
pub mod cluster;
pub mod gemm;
#[cfg(feature = "cuda")]
pub mod pipeline;
#[cfg(feature = "cuda")]
pub mod ptx;
#[cfg(feature = "cuda")]
pub mod tma;
#[cfg(feature = "cuda")]
pub mod wgmma;

use crate::nvidia::{Half, registers};
#[cfg(feature = "cube")]
use cubecl::{client::Client, ir::features::Tma};

/// True if the device is an NVIDIA Hopper GPU (sm_90) and CubeCL compiles the device's kernels through CUDA C++.
#[cfg(feature = "cube")]
pub fn is_hopper(client: &Client) -> bool {
    let properties = client.properties();
    // Check for TMA, which CubeCL supports only through CUDA C++. Check for sm_90 by name, because later architectures
    // have other tensor-core instructions.
    cfg!(feature = "cuda")
        && properties.features.tma.contains(Tma::Base)
        && properties.identity.fingerprint == "ptx_sm90"
}

/// The number of multiprocessors that plans assume if the runtime does not report the number.
pub const ASSUMED_MULTIPROCESSORS: usize = 132;

/// Returns the device's number of multiprocessors, or [`ASSUMED_MULTIPROCESSORS`].
#[cfg(feature = "cube")]
pub fn multiprocessors(client: &Client) -> usize {
    let count = client.properties().hardware.num_streaming_multiprocessors;
    count.map_or(ASSUMED_MULTIPROCESSORS, |count| count as usize)
}

/// The number of rows that one `wgmma` multiplies.
pub const PRODUCT_ROWS: usize = 64;

/// The number of threads per warpgroup.
pub const WARPGROUP: usize = 128;

/// The multiplication `left · rightᵀ`, with both operands in shared memory as subtiles of 64 columns. An example is the
/// product of queries and keys, S = Q Kᵀ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScoreProduct {
    /// The number of columns of both operands, which is the inner dimension of the multiplication.
    pub depth: usize,
    /// The number of rows in each 64-column subtile of the left operand.
    pub left_rows: usize,
    /// The number of rows of the right operand, which is the number of columns of the result.
    pub right_rows: usize,
    /// The precision of the operands.
    pub half: Half,
}

impl ScoreProduct {
    /// Returns the number of registers in the result's register vector.
    pub const fn fragment(&self) -> usize {
        registers(self.right_rows / 2)
    }
}

/// The multiplication `left · right`, with the left operand in registers and the right operand in shared memory. An
/// example is the product P V of probabilities and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Product {
    /// The number of rows of the right operand, which is the inner dimension of the multiplication.
    pub depth: usize,
    /// The number of columns of the result.
    pub columns: usize,
    /// The precision of the operands.
    pub half: Half,
}

impl Product {
    /// Returns the numbers of registers in the register vectors of the left operand and of the result.
    pub const fn fragments(&self) -> [usize; 2] {
        [registers(self.depth / 4), registers(self.columns / 2)]
    }
}
