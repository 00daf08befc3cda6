//! The kernels. The mathematics (`visibility`, `score`, `softmax`, `schedule`) is written once; an engine
//! brings the tile product; `forward`, `backward` and `decode` are the algorithms over those parts.

#[cfg(feature = "cuda")]
pub(crate) mod aligned;
pub(crate) mod backward;
pub(crate) mod decode;
pub(crate) mod engine;
pub(crate) mod forward;
pub(crate) mod integers;
pub(crate) mod layout;
#[cfg(feature = "cuda")]
pub(crate) mod mask_bits;
#[cfg(feature = "cuda")]
pub(crate) mod product;
#[cfg(feature = "cuda")]
pub(crate) mod ptx;
pub(crate) mod rounding;
pub(crate) mod schedule;
pub(crate) mod score;
pub(crate) mod softmax;
#[cfg(all(test, feature = "cuda"))]
mod source;
pub(crate) mod visibility;
