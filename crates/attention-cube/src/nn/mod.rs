//! Modules of `burn-nn` with fused attention: the same fields, the same records, memory linear in the sequence length.
//!
//! | `burn::nn` | here |
//! |---|---|
//! | `attention::MultiHeadAttention` | [`MultiHeadAttention`] |
//! | `attention::MhaInput`, `attention::MhaCache` | [`MhaInput`], [`MhaCache`] |
//! | `transformer::TransformerEncoderLayer` | [`FusedTransformerEncoderLayer`] |
//! | `transformer::TransformerEncoder` | [`FusedTransformerEncoder`] |
//! | `transformer::TransformerEncoderInput` | [`TransformerEncoderInput`] |
//!
//! `From` converts `burn-nn`'s module to the module here and back, with the same parameters. Each module loads the
//! records (`into_record`, `save_file`) of its counterpart in `burn-nn`.
//!
//! ```
//! use attention_cube::nn::{MhaInput, MultiHeadAttention};
//! use burn::nn::attention::MultiHeadAttentionConfig;
//! use burn::tensor::{Bool, Device, Distribution, Tensor};
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex();
//! let config = MultiHeadAttentionConfig::new(32, 4).with_dropout(0.0);
//! let unfused = config.init(&device);
//! let fused = MultiHeadAttention::from(unfused); // the same parameters
//!
//! let x = Tensor::<3>::random([2, 10, 32], Distribution::Default, &device);
//! let padding = Tensor::<2, Bool>::full([2, 10], false, &device); // true hides a key
//! let input = MhaInput::self_attn(x).mask_pad(padding).causal();
//! let context = fused.forward(input.clone());
//! assert_eq!(context.dims(), [2, 10, 32]);
//!
//! // This method also returns the probabilities, which need memory that is quadratic in the length.
//! let output = fused.forward_with_weights(input);
//! assert_eq!(output.weights.dims(), [2, 4, 10, 10]);
//! # }
//! ```
//!
//! # Differences from burn-nn
//!
//! | case | `burn-nn` | here |
//! |---|---|---|
//! | a query whose keys are all hidden | mean of the rows of V; 0 with quiet softmax | 0 |
//! | hidden keys | their scores are replaced by `min_float` | excluded from the softmax exactly |
//! | `forward` | returns weights and context | returns the context |
//! | causal mask | a tensor `[batch, length, length]` | [`MhaInput::causal`], without a tensor |
//! | active dropout of the probabilities | random numbers of the device | inside the operator, from the seeds of [`seed_dropout`] |
//!
//! Masks have the meaning of `burn-nn`'s masks: **`true` hides a key**. [`sdpa`] and [`AttentionOptions::mask`] have the
//! meaning of PyTorch's masks, in which `true` makes a key visible.
//!
//! [`AttentionOptions::mask`]: crate::AttentionOptions::mask

mod attention;
mod cache;
mod encoder;
mod input;
mod sdpa;
mod seed;

pub use attention::MultiHeadAttention;
pub use cache::MhaCache;
pub use encoder::{
    FusedTransformerEncoder, FusedTransformerEncoderCache, FusedTransformerEncoderLayer,
    FusedTransformerEncoderLayerCache,
};
pub use input::{MhaInput, TransformerEncoderInput};
pub use sdpa::sdpa;
pub use seed::seed_dropout;
