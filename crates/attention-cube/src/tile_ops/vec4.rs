//! Vectors of four elements.

use cubecl::prelude::*;

/// A vector of four elements, the width of every shared-memory access.
pub(crate) type Four<C> = Vector<C, Const<4>>;

/// A vector of four f32 elements.
pub(crate) type Vec4 = Four<f32>;

/// Returns four zeros.
#[cube]
pub(super) fn zeros<C: Float>() -> Four<C> {
    Four::<C>::cast_from(0.0f32)
}
