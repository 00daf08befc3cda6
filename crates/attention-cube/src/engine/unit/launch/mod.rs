//! Launches the unit engine's kernels.

pub(crate) mod backward;
pub(crate) mod forward;
