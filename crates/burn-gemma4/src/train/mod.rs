//! What training needs beside a differentiable model.

pub(crate) mod loss;
pub(crate) mod packing;

mod gradients;
