//! The launches of the portable kernels.

pub(crate) mod backward;
pub(crate) mod forward;
