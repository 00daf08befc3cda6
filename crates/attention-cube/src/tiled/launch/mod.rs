//! Launches the kernels over tiles.

pub(crate) mod backward;
pub(crate) mod forward;
