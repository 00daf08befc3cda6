//! Tiles that any device multiplies: by a cube's units, with neither plane operations nor matrix units.

#[cfg(feature = "cube")]
pub(crate) mod direct;
#[cfg(feature = "cube")]
pub(crate) mod product;
pub(crate) mod table;
pub mod tiles;
