//! Programmatic dependent launch (PDL) on NVIDIA GPUs of sm_90 (Hopper) and later: a launch begins before the previous
//! launch has ended.
//!
//! Without PDL, a GPU is idle for about a microsecond between two dependent launches of a CUDA graph. One decode step
//! of a small model needs hundreds of launches. With PDL, the start of a launch overlaps with the end of the previous
//! launch. The started cubes may already load tensors that no launch writes, such as weights.
//!
//! The name of a kernel that takes part in PDL ends in [`SUFFIX`]. Each cube of the kernel does the following:
//!
//! - The cube allows the next launch to begin ([`launch_dependents()`]). A cube that does not call this function allows
//!   the next launch when the cube ends.
//! - The cube waits ([`wait_prior_launch()`]) before it reads any tensor that an earlier launch may have written, and
//!   before it writes anything.
//! - The cube then marks the tensors that earlier launches may have written ([`mark_volatile()`]).
//!
//! When the wait returns, all earlier launches have ended, because each launch waits for the launch before it.
//!
//! Outside a graph, `launch_dependents` and `wait_prior_launch` do nothing, and launches run one after the other.
//! `graph::make_edges_programmatic` turns a graph's dependencies into programmatic dependencies.
//!
//! In a GEMM or GEMV kernel, a cube allows the next launch only when the cube has issued its last loads. After an
//! earlier call of `launch_dependents`, the loads of the next launch would compete with the loads of the last cubes.
//! With earlier calls, a decode step of a small model took a tenth longer. All other kernels are small, and allow the
//! next launch immediately.

#[cfg(feature = "cuda")]
pub mod graph;
mod kernel;

pub use kernel::*;

use cubecl::client::Client;
#[cfg(feature = "cuda")]
use cubecl::ir::features::Tma;

/// The suffix of the names of kernels that take part in PDL. CubeCL may append more text to such a name.
pub const SUFFIX: &str = "_pdl";

/// True if the device supports PDL. The caller then compiles its kernels with PDL instructions.
pub fn supports_pdl(client: &Client) -> bool {
    #[cfg(feature = "cuda")]
    {
        // PDL needs CUDA C++, and was introduced with the same architecture as TMA. A device that supports TMA
        // therefore supports PDL.
        client.properties().features.tma.contains(Tma::Base)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = client;
        false
    }
}
