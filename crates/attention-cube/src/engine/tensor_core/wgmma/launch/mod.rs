//! Launches the wgmma engine's kernels.

pub(crate) mod backward;
pub(crate) mod forward;
