//! What a caller can ask of attention beyond the query, the keys and the values.

use burn::tensor::{Bool, Int, Tensor};

/// Where the diagonal of the causal mask lies when the query and the keys differ in length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CausalAlignment {
    /// The last query sees the last key: query `i` sees the keys `j ≤ i + kv_len − q_len`. With
    /// [`kv_lengths`](AttentionOptions::kv_lengths), the sequence's own length takes `kv_len`'s
    /// place. This is what decoding with a cache needs.
    #[default]
    BottomRight,
    /// The first query sees the first key: query `i` sees the keys `j ≤ i`.
    TopLeft,
}

/// Options of [`fused_attention`](crate::fused_attention), built by chaining.
///
/// The score of query `i` and key `j` is computed in f32, in this order: `q·k` × `scale`, then
/// `softcap · tanh(score / softcap)`, then `+ bias`; then whatever the query does not see is left out:
/// a key is visible when *all* of causal, window, mask, lengths and segments allow it.
///
/// ```
/// use attention_cube::AttentionOptions;
///
/// // A sliding layer of Gemma 4: scale 1, causal, the last 512 keys including the query's own.
/// let options = AttentionOptions::new().scale(1.0).causal().window(Some(511), Some(0));
/// # let _ = options;
/// ```
#[derive(Clone, Debug, Default)]
pub struct AttentionOptions {
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) causal: Option<CausalAlignment>,
    pub(crate) window_left: Option<usize>,
    pub(crate) window_right: Option<usize>,
    pub(crate) mask: Option<Tensor<4, Bool>>,
    pub(crate) bias: Option<Tensor<4>>,
    pub(crate) kv_lengths: Option<Tensor<1, Int>>,
    pub(crate) kv_lengths_ahead: bool,
    pub(crate) segments: Option<(Tensor<2, Int>, Tensor<2, Int>)>,
    pub(crate) sinks: Option<Tensor<1>>,
    pub(crate) deterministic: bool,
}

impl AttentionOptions {
    /// Full attention with the scale `1/√head_dim`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Factor on `q·k`; any finite value. Default `1/√head_dim`.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Bounds the scores smoothly: `softcap · tanh(score / softcap)`. Finite and above zero.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// No query sees a key after its own position, aligned at the bottom right.
    pub fn causal(self) -> Self {
        self.causal_aligned(CausalAlignment::BottomRight)
    }

    /// No query sees a key after its own position, under the alignment given.
    pub fn causal_aligned(mut self, alignment: CausalAlignment) -> Self {
        self.causal = Some(alignment);
        self
    }

    /// A query at position `p` sees the keys `p − left ..= p + right`; `None` leaves a side open.
    ///
    /// Positions are aligned as for causal attention (at the bottom right unless
    /// [`causal_aligned`](Self::causal_aligned) says otherwise). A "sliding window of n" that counts
    /// the query's own key, as Hugging Face models do, is `window(Some(n − 1), Some(0))`.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window_left = left;
        self.window_right = right;
        self
    }

    /// Which keys a query may see: **`true` is visible**. Broadcastable to
    /// `[batch, q_heads, q_len, kv_len]`: each dimension has that size or 1.
    ///
    /// Burn's own `attention` takes the opposite convention (`true` hides): pass `mask.bool_not()`
    /// of such a mask.
    pub fn mask(mut self, mask: Tensor<4, Bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Added to the scores after scale and softcap; differentiable. Broadcastable to
    /// `[batch, q_heads, q_len, kv_len]`: each dimension has that size or 1. Of the query's dtype,
    /// or f32. A bias of −∞ hides the key.
    pub fn bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// How many keys of each sequence exist, `[batch]`; the keys after them are never seen, whatever
    /// they hold. Values are clamped to `0..=kv_len`.
    pub fn kv_lengths(mut self, kv_lengths: Tensor<1, Int>) -> Self {
        self.kv_lengths = Some(kv_lengths);
        self
    }

    /// Whether [`kv_lengths`](Self::kv_lengths) are there before anything that is launched together with the attention, as a graph's
    /// launches are: no launch of it writes them. Kernels that begin before the launch before has ended then read them at once.
    pub fn kv_lengths_ahead(mut self, ahead: bool) -> Self {
        self.kv_lengths_ahead = ahead;
        self
    }

    /// Packed documents: ids of the queries `[batch, q_len]` and of the keys `[batch, kv_len]`. Only
    /// equal ids see each other. Ids fit in 32 bits. Blocks are skipped best when each document's
    /// tokens lie together.
    pub fn segments(mut self, query: Tensor<2, Int>, key: Tensor<2, Int>) -> Self {
        self.segments = Some((query, key));
        self
    }

    /// One more score per query head, `[q_heads]`, that takes part in the softmax but has no value;
    /// differentiable. Neither scale, softcap nor bias applies to it. The logsumexp includes it. Of
    /// the query's dtype, or f32.
    pub fn sinks(mut self, sinks: Tensor<1>) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Asks for gradients that are equal bit by bit between runs, at whatever that costs. Every kernel
    /// of today is deterministic as it stands.
    pub fn deterministic(mut self, deterministic: bool) -> Self {
        self.deterministic = deterministic;
        self
    }
}
