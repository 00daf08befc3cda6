//! Ring attention over several devices of one process, by the method of Liu et al. (2023, arXiv:2310.01889).
//!
//! The sequence is divided among ranks, each with a device and a thread. The keys and values travel from rank to rank,
//! and each rank computes its own queries over the keys that visit its device. The benchmark `ring` measures this code.

mod link;
mod passes;
mod run;
mod worker;
mod zigzag;

pub use passes::{Forward, Gradients, Shard};
pub use run::Ring;
