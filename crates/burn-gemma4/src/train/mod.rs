//! What training needs beside a differentiable model.

pub(crate) mod packing;
pub(crate) mod recorder;

mod anew;
mod gradients;
mod loss;
