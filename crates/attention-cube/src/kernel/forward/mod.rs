//! The forward, by every engine that has one.

#[cfg(feature = "cuda")]
pub(crate) mod bias;
#[cfg(feature = "cuda")]
pub(crate) mod by_columns;
#[cfg(feature = "cuda")]
pub(crate) mod by_rows;
#[cfg(feature = "cuda")]
pub(crate) mod fragment;
#[cfg(feature = "cuda")]
pub(crate) mod holes;
#[cfg(feature = "cuda")]
pub(crate) mod measure;
#[cfg(feature = "cuda")]
pub(crate) mod output;
#[cfg(feature = "cuda")]
pub(crate) mod tile;
#[cfg(feature = "cuda")]
mod turns;
pub(crate) mod unit;
