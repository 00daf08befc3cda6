//! What training needs beside a differentiable model.

pub(crate) mod packing;

mod anew;
mod gradients;
mod loss;
