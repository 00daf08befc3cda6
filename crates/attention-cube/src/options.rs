//! The options of an attention call: all arguments other than the query, the keys and the values.

use crate::block_mask::BlockMask;
use crate::math::dropout::Threshold;
use crate::math::score_mod::{LearnedScoreMod, MaskCode, MaskMod, ScoreCode, ScoreMod};
use burn::tensor::{Bool, Int, Tensor};

/// The alignment of the causal mask's diagonal. The alignment matters if the numbers of queries and keys differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CausalAlignment {
    /// The last query sees the last key: query `i` sees the keys `j ≤ i + kv_len − q_len`. Decoding with a KV cache needs
    /// this alignment. [`kv_lengths`](AttentionOptions::kv_lengths) and [`query_lengths`](AttentionOptions::query_lengths)
    /// replace `kv_len` and `q_len` for each sequence.
    #[default]
    BottomRight,
    /// The first query sees the first key: query `i` sees the keys `j ≤ i`.
    TopLeft,
}

/// The dropout of attention probabilities. See [`AttentionOptions::dropout`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The chance that a probability is dropped, from 0 to 0.99.
    pub probability: f64,
    /// The seed of the random bits.
    pub seed: u64,
}

impl Dropout {
    pub(crate) fn threshold(&self) -> Threshold {
        Threshold::of(self.probability)
    }
}

/// The options of [`fused_attention`](crate::fused_attention), built by chaining.
///
/// The score of query `i` and key `j` is computed in f32, in three steps: `scale · q·k`, then
/// `softcap · tanh(score / softcap)`, then `score + bias`. A query sees a key if *all* options allow it: causal mask,
/// window, mask, block mask, lengths, segments and intervals. All other keys are left out of the softmax.
///
/// ```
/// use attention_cube::AttentionOptions;
///
/// // A sliding-window layer of Gemma 4: scale 1, causal, the last 512 keys including the query's own.
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
    pub(crate) block_mask: Option<BlockMask>,
    pub(crate) bias: Option<Tensor<4>>,
    pub(crate) kv_lengths: Option<Tensor<1, Int>>,
    pub(crate) kv_lengths_ahead: bool,
    pub(crate) query_lengths: Option<Tensor<1, Int>>,
    pub(crate) segments: Option<(Tensor<2, Int>, Tensor<2, Int>)>,
    pub(crate) intervals: Vec<(Tensor<2, Int>, Tensor<2, Int>)>,
    pub(crate) sinks: Option<Tensor<1>>,
    pub(crate) dropout: Option<Dropout>,
    pub(crate) score_mod: Option<ScoreCode>,
    pub(crate) score_table: Option<Tensor<1>>,
    pub(crate) mask_mod: Option<MaskCode>,
    pub(crate) mask_table: Option<Tensor<1>>,
}

impl AttentionOptions {
    /// Returns the options of full attention with the scale `1/√head_dim`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the factor that multiplies `q·k`. Any finite value is valid. The default is `1/√head_dim`.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Caps the scores smoothly: `softcap · tanh(score / softcap)`. The value must be finite and above zero.
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Hides all keys after the query's own position, with positions aligned at the bottom right.
    pub fn causal(self) -> Self {
        self.causal_aligned(CausalAlignment::BottomRight)
    }

    /// Hides all keys after the query's own position, under the given alignment.
    pub fn causal_aligned(mut self, alignment: CausalAlignment) -> Self {
        self.causal = Some(alignment);
        self
    }

    /// Restricts the query at position `p` to the keys at positions `p − left ..= p + right`. `None` leaves a side unbounded.
    ///
    /// Positions are aligned at the bottom right, unless [`causal_aligned`](Self::causal_aligned) sets another alignment. A
    /// "sliding window of n" in Hugging Face models counts the query's own key: use `window(Some(n − 1), Some(0))`.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        self.window_left = left;
        self.window_right = right;
        self
    }

    /// Sets the mask, `[batch, q_heads, q_len, kv_len]`: **`true` means visible**. A dimension of size 1 is broadcast.
    ///
    /// Burn's own `attention` uses the opposite convention (`true` hides a key): use [`hidden`](Self::hidden) for such a mask.
    /// A call has either this mask or a [`block_mask`](Self::block_mask), not both.
    pub fn mask(mut self, mask: Tensor<4, Bool>) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Sets a mask with one element per block of queries and block of keys, for block-sparse attention. Kernels skip
    /// the blocks of keys that the mask hides from a whole tile of queries. A call has either this mask or a
    /// [`mask`](Self::mask), not both.
    pub fn block_mask(mut self, mask: BlockMask) -> Self {
        self.block_mask = Some(mask);
        self
    }

    /// Sets a bias, `[batch, q_heads, q_len, kv_len]`, which is added to the scores after scale and softcap. A dimension of
    /// size 1 is broadcast. The bias is differentiable. Its dtype is the query's dtype or f32. A bias of −∞ hides the key.
    pub fn bias(mut self, bias: Tensor<4>) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Sets the number of valid keys per sequence, `[batch]`. No query sees a key whose index is at least this number,
    /// whatever the key contains. Lengths are clamped to `0..=kv_len`.
    pub fn kv_lengths(mut self, kv_lengths: Tensor<1, Int>) -> Self {
        self.kv_lengths = Some(kv_lengths);
        self
    }

    /// Sets the number of queries per sequence, `[batch]` (ragged queries). One batch can then mix prompt chunks and
    /// single tokens.
    ///
    /// Each sequence has `q_len` query rows, and its queries are the first of these rows. The remaining rows see no
    /// key, and the output and the gradients of the remaining rows are 0. Lengths are clamped to `0..=q_len`.
    ///
    /// With alignment at the bottom right, the sequence's last query sees the last of the sequence's
    /// [`kv_lengths`](Self::kv_lengths) keys.
    ///
    /// ```
    /// use attention_cube::{AttentionOptions, fused_attention};
    /// use burn::tensor::{Device, Distribution, Int, Tensor};
    ///
    /// # #[cfg(feature = "flex")] {
    /// let device = Device::flex();
    /// let random = |length| Tensor::<4>::random([2, 1, length, 8], Distribution::Default, &device);
    /// // The first sequence adds three tokens to a cache of 5, the second adds one token to a cache of 9.
    /// let options = AttentionOptions::new()
    ///     .causal()
    ///     .query_lengths(Tensor::<1, Int>::from_ints([3, 1], &device))
    ///     .kv_lengths(Tensor::<1, Int>::from_ints([8, 10], &device));
    /// let output = fused_attention(random(3), random(10), random(10), options);
    /// assert_eq!(output.slice([1..2, 0..1, 1..3]).abs().sum().into_scalar::<f32>(), 0.0);
    /// # }
    /// ```
    pub fn query_lengths(mut self, query_lengths: Tensor<1, Int>) -> Self {
        self.query_lengths = Some(query_lengths);
        self
    }

    /// Promises that the tensor [`kv_lengths`](Self::kv_lengths) is complete before the start of the CUDA graph that
    /// contains this call. No launch of the graph may write this tensor.
    ///
    /// Kernels with programmatic dependent launch (PDL) then read the lengths before the previous launch has ended. If the
    /// promise is broken, results are wrong. The promise has no effect with [`query_lengths`](Self::query_lengths).
    #[cfg(feature = "internals")]
    #[doc(hidden)]
    pub fn kv_lengths_ahead(mut self, ahead: bool) -> Self {
        self.kv_lengths_ahead = ahead;
        self
    }

    /// Sets the segment ids of packed documents: `[batch, q_len]` for the queries, `[batch, kv_len]` for the keys. A query
    /// sees only keys with the query's own id. Ids must fit in 32 bits.
    pub fn segments(mut self, query: Tensor<2, Int>, key: Tensor<2, Int>) -> Self {
        self.segments = Some((query, key));
        self
    }

    /// Sets a mask with the meaning of masks in Burn's own `attention` and in `burn-nn`: **`true` means hidden**. The mask
    /// replaces an earlier [`mask`](Self::mask).
    ///
    /// # Shapes
    /// `mask [batch, q_heads, q_len, kv_len]`, where a dimension of size 1 is broadcast.
    pub fn hidden(self, mask: Tensor<4, Bool>) -> Self {
        self.mask(mask.bool_not())
    }

    /// Adds one interval of keys per query: query `i` of sequence `b` sees the keys `start[b, i] <= j < end[b, i]`. A
    /// second call adds a second interval. A query then sees the keys of both intervals.
    ///
    /// Intervals describe image blocks with bidirectional attention, prefix-LM masks, packed documents and windows of any
    /// shape. Kernels skip blocks of keys outside of the intervals. An interval with `end <= start` is empty. `start` and
    /// `end` are clamped to `0..=kv_len`.
    ///
    /// Like all options, intervals only hide keys. If some queries must see later keys, do not set [`causal`](Self::causal),
    /// but express the causal mask in the intervals.
    ///
    /// # Shapes
    /// `start [batch, q_len]`, `end [batch, q_len]`. The tensors of all intervals have the same int dtype.
    ///
    /// ```
    /// use attention_cube::AttentionOptions;
    /// use burn::tensor::{Device, Int, Tensor};
    ///
    /// // Causal attention over six tokens, in which the image tokens 2, 3 and 4 also see each other.
    /// let device = Device::default();
    /// let start = Tensor::<2, Int>::from_ints([[0, 0, 0, 0, 0, 0]], &device);
    /// let end = Tensor::<2, Int>::from_ints([[1, 2, 5, 5, 5, 6]], &device);
    /// let options = AttentionOptions::new().visible_between(start, end);
    /// # let _ = options;
    /// ```
    pub fn visible_between(mut self, start: Tensor<2, Int>, end: Tensor<2, Int>) -> Self {
        self.intervals.push((start, end));
        self
    }

    /// Sets the sinks, `[q_heads]`. A sink is an additional score per query head. The sink takes part in the softmax but has
    /// no row of V.
    ///
    /// Sinks are differentiable. Their dtype is the query's dtype or f32. Scale, softcap and bias do not apply to sinks. The
    /// logsumexp includes the sink.
    pub fn sinks(mut self, sinks: Tensor<1>) -> Self {
        self.sinks = Some(sinks);
        self
    }

    /// Drops probabilities at random, for training. Each probability becomes 0 with the chance `probability`. The kept
    /// probabilities are multiplied by a factor that preserves the mean.
    ///
    /// The random bits depend only on the seed and on the score's sequence, head, query and key. Use another seed in
    /// each call, and in each of the [`shards`](crate::shards). All replays of a captured CUDA graph use the same seed.
    ///
    /// `probability` must be from 0 to 0.99, and is rounded to a multiple of 2⁻¹⁶.
    ///
    /// ```
    /// use attention_cube::AttentionOptions;
    ///
    /// let seed = 17; // a number that differs for each training step and each layer
    /// let options = AttentionOptions::new().causal().dropout(0.1, seed);
    /// # let _ = options;
    /// ```
    pub fn dropout(mut self, probability: f64, seed: u64) -> Self {
        self.dropout = (probability != 0.0).then_some(Dropout { probability, seed });
        self
    }

    /// Changes each score by code that is compiled into the kernels: FlexAttention's `score_mod`. The code runs after the
    /// softcap and before the bias. The code can read `table`.
    ///
    /// The module [`score_mod`](crate::score_mod) explains how to write the code, and has ready-made types.
    ///
    /// # Shapes
    /// `table [n]` of any size, f32 or the query's dtype.
    ///
    /// # Panics
    /// The attention call panics if autodiff tracks the table. Use [`learned_score_mod`](Self::learned_score_mod) for
    /// such a table.
    pub fn score_mod<M: ScoreMod>(mut self, table: Option<Tensor<1>>) -> Self {
        self.score_mod = Some(ScoreCode::of::<M>());
        self.score_table = table;
        self
    }

    /// Changes each score like [`score_mod`](Self::score_mod). The table has a gradient, for example to train the
    /// biases of T5 or the slopes of ALiBi.
    ///
    /// The gradient costs an extra pass over all scores, which runs only if autodiff tracks the table. The pass uses tensor
    /// cores in half precision on NVIDIA cards, if the code is [`OF_DISTANCE`](LearnedScoreMod::OF_DISTANCE). Otherwise it
    /// runs on scalar units. A table without elements counts as absent. Shards return the gradient in
    /// [`ShardGradients`](crate::shards::ShardGradients).
    ///
    /// ```
    /// use attention_cube::score_mod::Alibi;
    /// use attention_cube::{AttentionOptions, fused_attention};
    /// use burn::tensor::{Device, Distribution, Tensor};
    ///
    /// # #[cfg(feature = "flex")] {
    /// let device = Device::flex().autodiff();
    /// let random = || Tensor::<4>::random([1, 2, 16, 8], Distribution::Default, &device);
    /// let slopes = Alibi::slopes(2, &device).require_grad();
    /// let options = AttentionOptions::new().causal().learned_score_mod::<Alibi>(slopes.clone());
    /// let output = fused_attention(random(), random(), random(), options);
    /// let gradients = output.sum().backward();
    /// assert_eq!(slopes.grad(&gradients).map(|gradient| gradient.dims()), Some([2]));
    /// # }
    /// ```
    ///
    /// # Shapes
    /// `table [n]` of any size, f32 or the query's dtype.
    pub fn learned_score_mod<M: ScoreMod + LearnedScoreMod>(mut self, table: Tensor<1>) -> Self {
        self.score_mod = Some(ScoreCode::learned::<M>());
        self.score_table = Some(table);
        self
    }

    /// Hides keys by code that is compiled into the kernels: FlexAttention's `mask_mod`. The code can read `table`.
    ///
    /// Kernels run the code for each score. A kernel does not know which blocks of keys the code hides, so it cannot
    /// skip these blocks. If the code hides most keys, also set [`window`](Self::window) or
    /// [`visible_between`](Self::visible_between), so that kernels skip blocks.
    ///
    /// The module [`score_mod`](crate::score_mod) explains how to write the code, and has ready-made types.
    ///
    /// # Shapes
    /// `table [n]` of any size, f32 or the query's dtype.
    ///
    /// # Panics
    /// The attention call panics if autodiff tracks the table.
    pub fn mask_mod<M: MaskMod>(mut self, table: Option<Tensor<1>>) -> Self {
        self.mask_mod = Some(MaskCode::of::<M>());
        self.mask_table = table;
        self
    }

    /// Returns the mask or the block mask, and the numbers of queries and of keys per element of this mask.
    pub(crate) fn any_mask(&self) -> Option<(&Tensor<4, Bool>, [usize; 2])> {
        let of_scores = self.mask.as_ref().map(|mask| (mask, [1, 1]));
        of_scores.or(self
            .block_mask
            .as_ref()
            .map(|mask| (&mask.visible, mask.block)))
    }

    /// Expands the bias along the keys, so that its last dimension becomes `kv_len`. The bias must have one element per
    /// query.
    pub(crate) fn with_bias_of_keys(mut self, kv_len: usize) -> Self {
        self.bias = self.bias.map(|bias| {
            let [batch, q_heads, q_len, _] = bias.dims();
            bias.expand([batch, q_heads, q_len, kv_len])
        });
        self
    }

    /// Removes the autodiff nodes of all tensors.
    pub(crate) fn without_autodiff(self) -> Self {
        Self {
            mask: self.mask.map(Tensor::without_autodiff),
            block_mask: self.block_mask.map(|mask| BlockMask {
                visible: mask.visible.without_autodiff(),
                ..mask
            }),
            bias: self.bias.map(Tensor::without_autodiff),
            kv_lengths: self.kv_lengths.map(Tensor::without_autodiff),
            query_lengths: self.query_lengths.map(Tensor::without_autodiff),
            segments: self
                .segments
                .map(|(query, key)| (query.without_autodiff(), key.without_autodiff())),
            intervals: (self.intervals.into_iter())
                .map(|(start, end)| (start.without_autodiff(), end.without_autodiff()))
                .collect(),
            sinks: self.sinks.map(Tensor::without_autodiff),
            score_table: self.score_table.map(Tensor::without_autodiff),
            mask_table: self.mask_table.map(Tensor::without_autodiff),
            ..self
        }
    }
}
