//! Launches that begin before those before them have ended: NVIDIA's programmatic dependent launch, from sm_90 (Hopper) on.
//!
//! Between two launches of a graph, one of which waits for the other, a card does nothing for about a microsecond: the last cubes
//! end, the next ones are put in their places and fetch what they compute by. A token of a small model is hundreds of launches. Where a
//! kernel's cubes begin before the ones before them have ended, that happens meanwhile, and they may read what no launch writes, such as weights.
//!
//! A kernel that takes part says so by its name, which ends in [`SUFFIX`]. Each of its cubes lets the next launch begin
//! ([`let_next_begin()`]; else that begins when all cubes have ended), and waits ([`await_previous()`]) before it reads what an earlier launch may have written, and before it writes
//! anything, and then names what it reads of that ([`was_written()`]): when the wait returns, the launch before has ended, which itself has waited for the one before it, and so all have. Outside a graph
//! both do nothing, and launches follow each other as ever. A graph's dependencies become such ones by `graph::overlap_launches`.
//!
//! A product lets the next launch begin when a cube's last reads are on their way, and no earlier: where more cubes than run at once let it as they began,
//! the next launch's reads went between those of the last of them, and a token of a small model took a tenth longer. All others,
//! which are small, let it at once.

#[cfg(feature = "cuda")]
pub mod graph;
mod kernel;

pub use kernel::*;

use cubecl::client::Client;
#[cfg(feature = "cuda")]
use cubecl::ir::features::Tma;

/// How the names of kernels that take part end, before CubeCL's own additions.
pub const SUFFIX: &str = "_overlapped";

/// Whether kernels of the device take part, and so are compiled with the instructions for it.
pub fn overlaps(client: &Client) -> bool {
    #[cfg(feature = "cuda")]
    {
        // Through CUDA C++ alone; both came with the same architecture.
        client.properties().features.tma.contains(Tma::Base)
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = client;
        false
    }
}
