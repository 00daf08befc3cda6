//! The division of a block between the two warpgroups, and the named barriers at which the warpgroups wait for each
//! other.

use crate::engine::tensor_core::wgmma::plan::WgmmaSplitDTiles;
use cube_kit::hopper::WARPGROUP;

/// The number of keys of a block for which each warpgroup computes the scores.
pub(super) const HALF_KEYS: usize = WgmmaSplitDTiles::KEYS / 2;

/// The number of threads in the consumer warpgroups.
pub(super) const CONSUMERS: usize = WgmmaSplitDTiles::WARPGROUPS * WARPGROUP;

/// The number of chunks of V that each warpgroup multiplies per block.
pub(super) const OWN_CHUNKS: usize = WgmmaSplitDTiles::KEYS / WgmmaSplitDTiles::VALUE_KEYS;

/// The named barrier at which the warpgroups wait until both have written their row maxima.
pub(super) const MAXIMA: u32 = 1;

/// The named barrier at which the warpgroups wait until both have written their halves of P.
pub(super) const PROBABILITIES: u32 = 2;
