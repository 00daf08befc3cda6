//! Compile-time settings of the backward kernels that use tiles of type [`UnitTiles`].

use crate::math::score::{ScoreArguments, ScoreKind};
use crate::math::visibility::Structure;
use crate::tile_ops::tiles::UnitTiles;
use cubecl::prelude::*;

/// The compile-time settings of a backward kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BackwardKind {
    pub tiles: UnitTiles,
    pub structure: Structure,
    pub score: ScoreKind,
}

/// Returns the factor by which a kernel multiplies the gradients of queries and keys, after the kernel has summed these
/// gradients.
///
/// With tensor-core fragments (cmma), a kernel rounds dS (the gradient of the scores) to half precision. If dS
/// contained the scale of the scores, dS could underflow. The kernel therefore scales the finished gradients instead.
/// With all other tiles, dS contains the scale, and the factor is 1.
#[cube]
pub(crate) fn late_scale(score: &ScoreArguments, #[comptime] tiles: UnitTiles) -> f32 {
    let mut scale = f32::new(1.0);
    if comptime!(tiles.has_fragments()) {
        scale = score.scale;
    }
    scale
}
