//! GEMMs of activations and gradients with the weights of a checkpoint.

#[cfg(feature = "cuda")]
mod concat;
#[cfg(feature = "flex")]
mod flex;
mod matrix;
mod multiply;
#[cfg(any(feature = "cuda", all(test, feature = "flex")))]
mod product;
mod whole;

#[cfg(feature = "cuda")]
pub(crate) use concat::side_by_side;
#[cfg(feature = "flex")]
pub(crate) use flex::{rows_of_words, serves_words};
#[cfg(feature = "cube")]
pub(crate) use matrix::Matrices;
pub(crate) use matrix::{Matrix, QuantizedMatrix};
pub(crate) use multiply::{columns, rows};
#[cfg(feature = "cuda")]
pub(crate) use whole::on_tensor_cores;
#[cfg(feature = "cube")]
pub(crate) use whole::product_of_cube;
pub(crate) use whole::{batches, product, whole_rows};
