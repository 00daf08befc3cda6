//! Scores and masks as code that is compiled into the kernels, like FlexAttention's `score_mod` and `mask_mod`.
//!
//! A type that implements [`ScoreMod`] changes each score, and a type that implements [`MaskMod`] hides keys. The
//! attribute `#[cube]` of [CubeCL](https://github.com/tracel-ai/cubecl) turns their functions into code for GPUs.
//! Memory stays linear in the sequence length.
//!
//! ```
//! # #[cfg(feature = "cube")] mod example {
//! use attention_cube::score_mod::{MaskMod, ScoreMod, ScorePlace, ScoreTable};
//! use cubecl::prelude::*;
//!
//! /// Multiplies the scores of each head by the head's temperature, which the table holds.
//! pub struct Temperature;
//!
//! #[cube]
//! impl ScoreMod for Temperature {
//!     fn score(score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
//!         score * table.at(place.head)
//!     }
//!
//!     fn derivative(_score: f32, place: ScorePlace, table: &ScoreTable) -> f32 {
//!         table.at(place.head)
//!     }
//! }
//!
//! /// Shows each third key, counted backwards from the query's own position.
//! pub struct Strided;
//!
//! #[cube]
//! impl MaskMod for Strided {
//!     fn visible(place: ScorePlace, _table: &ScoreTable) -> bool {
//!         place.distance() % 3 == 0
//!     }
//! }
//! # }
//! # #[cfg(not(feature = "cube"))] fn main() {}
//! # #[cfg(feature = "cube")] fn main() {
//! # use example::*;
//! use attention_cube::{AttentionOptions, fused_attention};
//! use burn::tensor::{Device, Distribution, Tensor};
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex();
//! let random = || Tensor::<4>::random([1, 2, 9, 8], Distribution::Default, &device);
//! let temperatures = Tensor::<1>::from_floats([0.5, 2.0], &device);
//! let options = AttentionOptions::new()
//!     .causal()
//!     .score_mod::<Temperature>(Some(temperatures))
//!     .mask_mod::<Strided>(None);
//! let output = fused_attention(random(), random(), random(), options);
//! assert_eq!(output.dims(), [1, 2, 9, 8]);
//! # }
//! # }
//! ```
//!
//! Your project must use the same version of `cubecl` as this crate (see this crate's `Cargo.toml`).
//!
//! # The code
//! - The functions also run as plain Rust, on devices without kernels. Use operators, `if`, `as` and methods such as `abs`.
//!   CubeCL's functions that exist on GPUs only, such as `f32::cast_from`, panic in plain Rust.
//! - The functions must be pure. Gradients are wrong if [`derivative`](ScoreMod::derivative) is not the derivative of
//!   [`score`](ScoreMod::score).
//! - Kernels may also call the functions at positions past the end of the queries or keys, and ignore the result.
//! - An index past the end of a table reads the table's last element. In the code, the elements are f32, whatever the
//!   table's dtype is.
//! - Scores should stay finite. Use a [`MaskMod`] to hide keys.
//! - Set [`ADDS_BIAS`](ScoreMod::ADDS_BIAS) if the code adds a number to the score. Multiply the distance by
//!   [`distance_times`](ScorePlace::distance_times). Both spare an instruction per score.
//! - A table has a gradient if its type also implements [`LearnedScoreMod`], and if the table is passed to
//!   [`learned_score_mod`](crate::AttentionOptions::learned_score_mod). All other tables have none:
//!   [`fused_attention`](crate::fused_attention) panics if autodiff tracks them.
//! - Set [`OF_DISTANCE`](LearnedScoreMod::OF_DISTANCE) if the learned elements depend on head and distance only. On an
//!   H200, the backward then takes about 2 times as long as with a table that has no gradient, instead of 100 times.
//! - The code computes in f32, also for f64 inputs.
//! - [`varlen`](crate::varlen) does not support score mods and mask mods. In a call on one of the
//!   [`shards`](crate::shards), key positions count from the shard's first key.
//!
//! # Ready-made types
//! | type | code |
//! |---|---|
//! | [`Alibi`] | − slope · magnitude of the distance (ALiBi) |
//! | [`DistanceBias`] | + a bias that depends on head and distance, such as T5's relative bias |
//! | [`SoftWindow`] | − falloff · the distance beyond a window |
//! | [`SameDocument`] | hides keys of other documents |

mod alibi;
mod distance_bias;
mod same_document;
mod soft_window;

pub use self::alibi::Alibi;
pub use self::distance_bias::DistanceBias;
pub use self::same_document::SameDocument;
pub use self::soft_window::SoftWindow;
pub use crate::math::score_mod::{
    LearnedScoreMod, MaskCode, MaskMod, ScoreCode, ScoreMod, ScorePlace, ScoreTable,
};
