//! Tile multiplications (QKᵀ and PV) for any device, in two ways. In one way, single units multiply, without plane
//! operations or matrix units. In the other way, planes multiply fragments (cmma), whose register layout only the
//! device knows.

#[cfg(feature = "cube")]
pub(crate) mod cmma;
#[cfg(feature = "cube")]
pub(crate) mod code_rows;
#[cfg(feature = "cube")]
pub(crate) mod direct;
pub mod fragment_tiles;
#[cfg(feature = "cube")]
pub(crate) mod fragments;
#[cfg(feature = "cube")]
pub(crate) mod product;
#[cfg(feature = "cube")]
pub(crate) mod row_access;
#[cfg(feature = "cube")]
pub(crate) mod score_layout;
#[cfg(feature = "cube")]
pub(crate) mod staged;
pub(crate) mod table;
pub mod tiles;
#[cfg(feature = "cube")]
pub(crate) mod used_columns;
#[cfg(feature = "cube")]
pub(crate) mod vec4;
