//! Tile multiplications (QKᵀ and PV) for any device: by units, without plane operations or matrix units, or by planes, with
//! fragments whose register layout only the device knows (cmma).

#[cfg(feature = "cube")]
pub(crate) mod cmma;
#[cfg(feature = "cube")]
pub(crate) mod direct;
pub mod fragment_tiles;
#[cfg(feature = "cube")]
pub(crate) mod fragments;
#[cfg(feature = "cube")]
pub(crate) mod int8_rows;
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
