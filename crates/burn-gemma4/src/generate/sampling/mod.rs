//! Sampling of the next token from the logits, on the host and on the device.

#[cfg(feature = "cube")]
pub(crate) mod device;
pub(crate) mod sampler;
