//! The attention problem: shapes, dtype and options of one attention call, validated once.

mod validate;

use crate::math::score_mod::{LearnedCode, MaskCode, ScoreCode};
use crate::options::{CausalAlignment, Dropout};
use crate::types::quantized::CodeFormat;
use burn::tensor::DType;
pub(crate) use validate::{check_dims, check_dtype, check_place, check_place_of, check_strategies};

/// The largest supported `head_dim` and `value_dim`.
pub const MAX_HEAD_DIM: usize = 1024;

/// The sizes and options of one attention call, without the call's tensors. [`explain`](crate::explain()) reports which kernel
/// serves the call.
///
/// The call computes `out[b, h, i] = Σⱼ softmaxⱼ(score(q[b, h, i]·k[b, h/group, j])) v[b, h/group, j]`, where
/// `group = q_heads / kv_heads`.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionProblem {
    /// The number of sequences.
    pub batch: usize,
    /// The number of query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// The number of key and value heads. Query head `h` reads key and value head `h / (q_heads / kv_heads)`.
    pub kv_heads: usize,
    /// The number of queries per sequence.
    pub q_len: usize,
    /// The number of keys per sequence.
    pub kv_len: usize,
    /// The number of columns of queries and keys.
    pub head_dim: usize,
    /// The number of columns of values and of the output.
    pub value_dim: usize,
    /// The dtype of query, keys, values and output.
    pub dtype: DType,
    /// The factor that multiplies `q·k`.
    pub scale: f64,
    /// See [`AttentionOptions::softcap`](crate::AttentionOptions::softcap).
    pub softcap: Option<f64>,
    /// See [`AttentionOptions::causal`](crate::AttentionOptions::causal).
    pub causal: Option<CausalAlignment>,
    /// See [`AttentionOptions::window`](crate::AttentionOptions::window).
    pub window_left: Option<usize>,
    /// See [`AttentionOptions::window`](crate::AttentionOptions::window).
    pub window_right: Option<usize>,
    /// The mask's shape, or `None` if the call has no mask.
    pub mask: Option<[usize; 4]>,
    /// The numbers of queries and of keys per element of the mask, `[1, 1]` for a mask with one element per score. See
    /// [`AttentionOptions::block_mask`](crate::AttentionOptions::block_mask).
    pub mask_block: [usize; 2],
    /// The bias's shape and dtype, or `None` if the call has no bias.
    pub bias: Option<([usize; 4], DType)>,
    /// True if every sequence has its own number of keys. See
    /// [`AttentionOptions::kv_lengths`](crate::AttentionOptions::kv_lengths).
    pub kv_lengths: bool,
    /// See [`AttentionOptions::kv_lengths_ahead`](crate::AttentionOptions::kv_lengths_ahead).
    pub kv_lengths_ahead: bool,
    /// True if every sequence has its own number of queries. See
    /// [`AttentionOptions::query_lengths`](crate::AttentionOptions::query_lengths).
    pub query_lengths: bool,
    /// True if every token has a segment id, for packed documents.
    pub segments: bool,
    /// The number of key intervals per query: 0, 1 or 2. See
    /// [`AttentionOptions::visible_between`](crate::AttentionOptions::visible_between).
    pub intervals: usize,
    /// The dtype of the sinks, or `None` if the call has no sinks.
    pub sinks: Option<DType>,
    /// The dropout of probabilities, or `None` without dropout.
    pub dropout: Option<Dropout>,
    /// The code that changes each score, or `None`. See [`AttentionOptions::score_mod`](crate::AttentionOptions::score_mod).
    pub score_mod: Option<ScoreCode>,
    /// The code that hides keys, or `None`. See [`AttentionOptions::mask_mod`](crate::AttentionOptions::mask_mod).
    pub mask_mod: Option<MaskCode>,
    /// The number of keys per page, or `None` if the keys of a sequence are contiguous. See [`paged`](crate::paged).
    pub page_len: Option<usize>,
    /// The format of [quantized](crate::quantized) keys and values, or `None` if keys and values are floats. If no
    /// kernel can read the codes, the call dequantizes keys and values, and selects a kernel for the unquantized
    /// problem.
    pub quantized: Option<CodeFormat>,
}

impl AttentionProblem {
    /// Returns the number of query heads that share one key and value head (the GQA group).
    pub fn group(&self) -> usize {
        self.q_heads / self.kv_heads.max(1)
    }

    /// True if the problem has a score mod or a mask mod.
    pub(crate) fn has_code(&self) -> bool {
        self.score_mod.is_some() || self.mask_mod.is_some()
    }

    /// Returns the functions for the gradient of the score mod's table, or `None` if the table has no gradient.
    pub(crate) fn learned_code(&self) -> Option<LearnedCode> {
        self.score_mod.and_then(|code| code.learned)
    }

    /// Returns the same problem over contiguous keys and values.
    pub(crate) fn over_contiguous_keys(&self) -> Self {
        Self {
            page_len: None,
            ..self.clone()
        }
    }

    /// True if `batch`, `q_heads`, `q_len` or `kv_len` is 0.
    pub fn is_empty(&self) -> bool {
        [self.batch, self.q_heads, self.q_len, self.kv_len].contains(&0)
    }

    /// Returns the shape of the output.
    pub fn output_shape(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.value_dim]
    }

    /// Returns the shape of the logsumexp.
    pub fn logsumexp_shape(&self) -> [usize; 3] {
        [self.batch, self.q_heads, self.q_len]
    }

    /// Returns the shape of the logsumexp in two parts, `[2 · batch, q_heads, q_len]`. The first part holds each
    /// query's reference score, which the softmax subtracts from the query's scores. A reference score is near the
    /// query's largest score. The second part holds the logarithms of the softmax sums.
    pub fn logsumexp_parts_shape(&self) -> [usize; 3] {
        [2 * self.batch, self.q_heads, self.q_len]
    }

    /// Returns the largest number of keys that a query sees to the right of its own position, or `None` if there is no
    /// limit. A causal mask gives 0.
    pub fn right(&self) -> Option<usize> {
        match self.causal {
            Some(_) => Some(0),
            None => self.window_right,
        }
    }

    /// True if every sequence has its own number of keys, or its own number of queries.
    pub(crate) fn has_lengths(&self) -> bool {
        self.kv_lengths || self.query_lengths
    }

    /// True if the problem has segments or intervals. Kernels then read bounds for each block of queries or keys, such
    /// as the smallest and the largest segment id, and skip hidden blocks.
    pub(crate) fn has_bounds(&self) -> bool {
        self.segments || self.intervals > 0
    }

    /// True if the mask has one element per block of queries and block of keys.
    pub(crate) fn has_block_mask(&self) -> bool {
        self.mask.is_some() && self.mask_block != [1, 1]
    }

    /// Returns the largest number of loop iterations in which a kernel decides, by the block mask, whether it skips a
    /// pair of a tile and a block. The pair covers `queries` queries of `heads` heads, and `keys` keys. Without a block
    /// mask, the number is 0.
    pub(crate) fn mask_search(&self, heads: usize, queries: usize, keys: usize) -> usize {
        let elements = |size: usize, block: usize| size.div_ceil(block) + 1;
        match self.has_block_mask() {
            true => {
                // The search has three nested loops, and a driver counts the iterations of all of them.
                let [of_queries, of_keys] = self.mask_block;
                heads * (1 + elements(queries, of_queries) * (1 + elements(keys, of_keys)))
            }
            false => 0,
        }
    }

    /// True if positions are aligned at the bottom right: the last query is aligned with the last key.
    pub fn is_bottom_right(&self) -> bool {
        self.causal.unwrap_or_default() == CausalAlignment::BottomRight
    }

    /// Returns an upper bound of the number of keys that `queries` neighboring queries see under causal mask and
    /// window. A key counts if at least one of these queries sees the key.
    pub(crate) fn visible_keys(&self, queries: usize) -> usize {
        match (self.window_left, self.right()) {
            (Some(left), Some(right)) => left
                .saturating_add(right)
                .saturating_add(queries)
                .min(self.kv_len),
            _ => self.kv_len,
        }
    }

    /// Returns an upper bound of the number of queries that see `keys` neighboring keys under causal mask and window. A
    /// query counts if it sees at least one of these keys.
    pub(crate) fn visible_queries(&self, keys: usize) -> usize {
        match (self.window_left, self.right()) {
            (Some(left), Some(right)) => left
                .saturating_add(right)
                .saturating_add(keys)
                .min(self.q_len),
            _ => self.q_len,
        }
    }

    /// Counts the (query, key) pairs that causal mask and window leave visible, over the batch and all query heads.
    /// Benchmarks compute operation counts from this number.
    pub fn visible_pairs(&self) -> u64 {
        let (q_len, kv_len) = (self.q_len as i64, self.kv_len as i64);
        let offset = if self.is_bottom_right() {
            kv_len - q_len
        } else {
            0
        };
        // A side of the window may be open, or wider than the sequences. Replace such a side by a number above every
        // distance of two positions.
        let side = |side: Option<usize>| {
            let beyond = self.q_len + self.kv_len;
            side.map_or(beyond, |side| side.min(beyond)) as i64
        };
        let (left, right) = (side(self.window_left), side(self.right()));
        let per_head: i64 = (0..q_len)
            .map(|i| {
                let position = i + offset;
                let first = (position - left).max(0);
                let end = (position + right + 1).min(kv_len);
                (end - first).max(0)
            })
            .sum();
        per_head as u64 * (self.batch * self.q_heads) as u64
    }
}
