//! Tiles that any device multiplies: by a cube's units, with neither plane operations nor matrix units, or by fragments of the device's
//! own layout.

#[cfg(feature = "cube")]
pub(crate) mod cmma;
#[cfg(feature = "cube")]
pub(crate) mod direct;
pub mod fragment_tiles;
#[cfg(feature = "cube")]
pub(crate) mod fragments;
#[cfg(feature = "cube")]
pub(crate) mod product;
#[cfg(feature = "cube")]
pub(crate) mod score_places;
#[cfg(feature = "cube")]
pub(crate) mod staged;
pub(crate) mod table;
pub mod tiles;
#[cfg(feature = "cube")]
pub(crate) mod words;
