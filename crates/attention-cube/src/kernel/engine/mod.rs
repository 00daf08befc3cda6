//! How a tile product is done, on any device and on Hopper; what the engines share lies beside this folder.

pub(crate) mod direct;
#[cfg(feature = "cuda")]
pub(crate) mod matrix;
#[cfg(feature = "cuda")]
pub(crate) mod ring;
pub(crate) mod unit;
#[cfg(feature = "cuda")]
pub(crate) mod wgmma;
