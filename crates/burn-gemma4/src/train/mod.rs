//! What training needs beside a differentiable model.

pub(crate) mod packing;

mod gradients;
mod loss;
