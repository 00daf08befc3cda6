//! The caches of autoregressive inference, with the semantics of `burn-nn`: each call gets the whole sequence so far.

use super::attention::MultiHeadAttention;
use super::input::MhaInput;
use burn::tensor::Tensor;

/// The cache of [`MultiHeadAttention::forward_cache`] for autoregressive inference.
///
/// The cache holds the projected keys and values, and the contexts (attention outputs) of earlier tokens. Unlike in
/// `burn-nn`, each step after the first computes only the last query.
#[derive(Clone, Debug)]
pub struct MhaCache {
    /// The projected keys and values, `[batch, n_heads, kv_len, d_k]`, or `None` before the first call.
    heads: Option<(Tensor<4>, Tensor<4>)>,
    /// True if each call after the first appends its last key and value to the cache (self-attention). False if all
    /// calls use the keys and values of the first call (cross-attention).
    grows: bool,
    /// The contexts (attention outputs) of the tokens so far, `[batch, q_len, d_model]`.
    context: Option<Tensor<3>>,
}

impl MhaCache {
    /// Creates an empty cache of self-attention.
    pub fn autoregressive() -> Self {
        Self {
            heads: None,
            grows: true,
            context: None,
        }
    }

    /// Creates an empty cache of cross-attention. All later calls use the keys and values of the first call.
    pub fn autoregressive_cross_attention() -> Self {
        Self {
            grows: false,
            ..Self::autoregressive()
        }
    }
}

impl MultiHeadAttention {
    /// Computes the context (attention output) of the whole sequence with a cache.
    ///
    /// The first call computes all queries. Each later call gets one more token, and computes only this token's
    /// context. The contexts of earlier tokens do not change. With a causal mask in the first call, the contexts equal
    /// the output of one causal [`forward`](Self::forward) over the whole sequence.
    ///
    /// Masks have the shapes of the whole sequence. Later calls use the last row of `mask_attn`. They need no
    /// [`causal`](MhaInput::causal), because a causal mask hides no key from the last query.
    ///
    /// # Shapes
    /// `query [batch, q_len, d_model]`, `key` and `value` `[batch, kv_len, d_model]` → `[batch, q_len, d_model]`.
    ///
    /// # Panics
    /// Panics like [`forward`](Self::forward), or if a later call's query is not one token longer than the cache.
    ///
    /// ```
    /// use attention_cube::nn::{MhaCache, MhaInput, MultiHeadAttention};
    /// use burn::nn::attention::MultiHeadAttentionConfig;
    /// use burn::tensor::{Device, Distribution, Tensor};
    ///
    /// # #[cfg(feature = "flex")] {
    /// let device = Device::flex();
    /// let mha = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(32, 4), &device);
    /// let tokens = Tensor::<3>::random([1, 6, 32], Distribution::Default, &device);
    /// let mut cache = MhaCache::autoregressive();
    /// for length in 3..=6 {
    ///     let input = MhaInput::self_attn(tokens.clone().narrow(1, 0, length)).causal();
    ///     let context = mha.forward_cache(input, &mut cache);
    ///     assert_eq!(context.dims(), [1, length, 32]);
    /// }
    /// # }
    /// ```
    pub fn forward_cache(&self, input: MhaInput, cache: &mut MhaCache) -> Tensor<3> {
        self.check_shapes(&input);
        let MhaInput {
            query,
            key,
            value,
            masks,
        } = input;
        let (query, masks) = match &cache.context {
            Some(context) => {
                let (q_len, cached) = (query.dims()[1], context.dims()[1]);
                assert!(
                    q_len == cached + 1,
                    "query: has `{q_len}` tokens; expected `{}`, one more than the cache",
                    cached + 1
                );
                (last_token(query), masks.last_query())
            }
            None => (query, masks),
        };
        let query = self.project_heads(query, &self.query);
        let (key, value) = match cache.heads.take() {
            Some((old_key, old_value)) if cache.grows => {
                let key = self.project_heads(last_token(key), &self.key);
                let value = self.project_heads(last_token(value), &self.value);
                (
                    Tensor::cat(vec![old_key, key], 2),
                    Tensor::cat(vec![old_value, value], 2),
                )
            }
            Some(heads) => heads,
            None => (
                self.project_heads(key, &self.key),
                self.project_heads(value, &self.value),
            ),
        };
        cache.heads = Some((key.clone(), value.clone()));
        let last = self.compute_context(query, key, value, masks);
        append(&mut cache.context, last)
    }
}

/// The cached output of a layer that computes each token independently of the other tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenCache {
    /// The output for all tokens so far, `[batch, length, d_model]`.
    output: Option<Tensor<3>>,
}

impl TokenCache {
    /// Returns the layer's output for the whole sequence. The first call computes all tokens. Each later call computes
    /// only the last token, and appends this token's output to the cached output.
    pub fn forward(
        &mut self,
        input: Tensor<3>,
        layer: impl Fn(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let rows = match self.output.is_some() {
            true => layer(last_token(input)),
            false => layer(input),
        };
        append(&mut self.output, rows)
    }
}

/// Appends rows to a cached tensor `[batch, length, d_model]`, and returns the whole tensor.
fn append(cached: &mut Option<Tensor<3>>, rows: Tensor<3>) -> Tensor<3> {
    let whole = match cached.take() {
        Some(cached) => Tensor::cat(vec![cached, rows], 1),
        None => rows,
    };
    *cached = Some(whole.clone());
    whole
}

/// Returns the last token of a sequence `[batch, length, d_model]`.
fn last_token(sequence: Tensor<3>) -> Tensor<3> {
    let length = sequence.dims()[1];
    assert!(
        length > 0,
        "sequence: has no token; expected at least one token"
    );
    sequence.narrow(1, length - 1, 1)
}
