//! The crate's data types, which every layer uses. This module neither computes nor launches kernels.

pub mod device;
pub mod engine;
pub mod fragment_verdict;
pub mod quantized;
pub mod refusal;
pub mod request;
pub mod tensors;
