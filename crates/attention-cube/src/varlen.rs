//! Attention over packed sequences of different lengths (varlen): one call without padding.
//!
//! The tokens of all sequences lie one after another. Cumulative lengths, FlashAttention's `cu_seqlens`, state where
//! each sequence starts and ends. Causal mask and window are aligned in each sequence separately.
//!
//! ```
//! use attention_cube::AttentionOptions;
//! use attention_cube::varlen::{Sequences, varlen_attention};
//! use burn::tensor::{Device, Distribution, Int, Tensor};
//!
//! # #[cfg(feature = "flex")] {
//! let device = Device::flex();
//! let random = |heads| Tensor::<3>::random([12, heads, 64], Distribution::Default, &device);
//! // Twelve tokens of three documents, which have 5, 1 and 6 tokens.
//! let documents = Sequences::of_self_attention(Tensor::<1, Int>::from_ints([0, 5, 6, 12], &device));
//! let options = AttentionOptions::new().causal();
//! let output = varlen_attention(random(8), random(2), random(2), &documents, options);
//! assert_eq!(output.dims(), [12, 8, 64]);
//! # }
//! ```
//!
//! [`Sequences::options`] turns the cumulative lengths into an [interval of keys](AttentionOptions::visible_between)
//! per query, once for all layers of a model. The device computes the intervals, so the host does not wait.
//!
//! # Contract
//! | case | result |
//! |---|---|
//! | attention | [the definition](crate::reference) over the tokens of each sequence, without the tokens of other sequences |
//! | NaN or infinity in a key or value that a query sees | may reach queries of other sequences |
//! | dropout | the random bits depend on the positions in the packed rows |
//! | a mask, a block mask or a bias | covers the packed rows, `[1, q_heads, q_len, kv_len]` |
//! | a sequence without keys | the queries of this sequence see no key |
//! | rows before the first or after the last sequence | these queries see no key, no query sees these keys, and the rows may contain NaN |
//! | cumulative lengths out of range | are clamped to the number of rows |
//! | cumulative lengths that decrease | the affected queries see unspecified keys, or none |
//! | [`kv_lengths`](AttentionOptions::kv_lengths), [`query_lengths`](AttentionOptions::query_lengths) and [`visible_between`](AttentionOptions::visible_between) | are refused |
//! | [`score_mod`](AttentionOptions::score_mod), [`learned_score_mod`](AttentionOptions::learned_score_mod) and [`mask_mod`](AttentionOptions::mask_mod) | are refused, because the code would see positions in the packed rows |
//!
//! # Speed
//! Tiles of queries skip the keys of other sequences, forward and backward. For decoding, where a tile would hold many
//! sequences, use [`query_lengths`](AttentionOptions::query_lengths) or [pages](crate::paged).

use crate::call::attend;
use crate::error::AttentionError;
use crate::integers::{INTS, clamped_integers};
use crate::options::{AttentionOptions, CausalAlignment};
use crate::problem::{check_dims, check_place_of};
use crate::reference::output_and_lse;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Shape, Tensor};

/// The cumulative lengths of packed sequences, in any integer dtype.
///
/// Sequence `s` has the queries `cu_seqlens_q[s] .. cu_seqlens_q[s + 1]`, and the keys `cu_seqlens_k[s] .. cu_seqlens_k[s + 1]`.
#[derive(Clone, Debug)]
pub struct Sequences {
    /// The index of each sequence's first query, followed by the end of the last sequence: `[sequences + 1]`, in
    /// ascending order.
    pub cu_seqlens_q: Tensor<1, Int>,
    /// The index of each sequence's first key, followed by the end of the last sequence: `[sequences + 1]`, in ascending order.
    pub cu_seqlens_k: Tensor<1, Int>,
}

impl Sequences {
    /// Returns packed sequences in which each sequence has as many keys as queries.
    ///
    /// # Shapes
    /// `cu_seqlens [sequences + 1]`.
    pub fn of_self_attention(cu_seqlens: Tensor<1, Int>) -> Self {
        Self {
            cu_seqlens_q: cu_seqlens.clone(),
            cu_seqlens_k: cu_seqlens,
        }
    }

    /// Returns the options for a call over the packed rows. A query then sees a key only if the key is in the query's
    /// own sequence and `options` do not hide it.
    ///
    /// Set causal mask and window in `options`, not on the result. On the result, a causal mask or a window would count
    /// positions in the packed rows.
    ///
    /// # Shapes
    /// `q_len` and `kv_len` are the numbers of packed rows. Pass the result to [`fused_attention`](crate::fused_attention)
    /// with a query `[1, q_heads, q_len, head_dim]` and keys `[1, kv_heads, kv_len, head_dim]`.
    ///
    /// # Errors
    /// Returns [`AttentionError`] if the cumulative lengths differ in size or device, are empty, or if an option does not
    /// fit.
    pub fn options(
        &self,
        q_len: usize,
        kv_len: usize,
        options: AttentionOptions,
    ) -> Result<AttentionOptions, AttentionError> {
        let [count] = self.cu_seqlens_q.dims();
        if count == 0 {
            return Err(AttentionError::Shape {
                argument: "cu_seqlens_q",
                has: vec![0],
                dimension: "sequences + 1",
                found: 0,
                expected: "at least 1".into(),
            });
        }
        let of_queries = [Some((count, "the size of cu_seqlens_q"))];
        check_dims(
            "cu_seqlens_k",
            &self.cu_seqlens_k.dims(),
            &["sequences + 1"],
            of_queries,
        )?;
        check_place_of(
            "cu_seqlens_k",
            self.cu_seqlens_k.device(),
            "cu_seqlens_q",
            &self.cu_seqlens_q.device(),
        )?;
        for (argument, is_set) in [
            ("kv_lengths", options.kv_lengths.is_some()),
            ("query_lengths", options.query_lengths.is_some()),
            ("visible_between", !options.intervals.is_empty()),
            // Refuse score mods and mask mods, because their code would see positions in the packed rows.
            ("score_mod", options.score_mod.is_some()),
            ("mask_mod", options.mask_mod.is_some()),
        ] {
            if is_set {
                return Err(AttentionError::Combination {
                    argument,
                    with: "packed sequences",
                });
            }
        }
        let interval = self.interval(q_len, kv_len, &options);
        Ok(AttentionOptions {
            causal: None,
            window_left: None,
            window_right: None,
            intervals: vec![interval],
            ..options
        })
    }

    /// Returns two tensors `[1, q_len]`, which state the range of keys that each query sees. The first tensor holds the
    /// index of the first key in this range. The second tensor holds the index after the last key in this range.
    fn interval(
        &self,
        q_len: usize,
        kv_len: usize,
        options: &AttentionOptions,
    ) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let device = self.cu_seqlens_q.device().without_autodiff();
        let sequences = self.cu_seqlens_q.dims()[0] - 1;
        if q_len == 0 || sequences == 0 {
            let nothing = Tensor::zeros([1, q_len], (&device, DType::from(INTS)));
            return (nothing.clone(), nothing);
        }
        let rows = Tensor::<1, Int>::arange(0..q_len as i64, (&device, DType::from(INTS)));
        let bounds = |cumulative: &Tensor<1, Int>, len: usize| {
            let cumulative = cumulative.clone().without_autodiff().into_dispatch();
            Tensor::<1, Int>::from_dispatch(clamped_integers::<Dispatch>(cumulative, len))
        };
        let query_bounds = bounds(&self.cu_seqlens_q, q_len);
        let key_bounds = bounds(&self.cu_seqlens_k, kv_len);
        let first = |bounds: &Tensor<1, Int>| bounds.clone().narrow(0, 0, sequences);
        let end = |bounds: &Tensor<1, Int>| bounds.clone().narrow(0, 1, sequences);

        // The query in packed row `r` is aligned with the key in packed row `r + shift`.
        let shift = match options.causal.unwrap_or_default() {
            CausalAlignment::BottomRight => end(&key_bounds) - end(&query_bounds),
            CausalAlignment::TopLeft => first(&key_bounds) - first(&query_bounds),
        };
        let index = count_bounds(rows.clone(), query_bounds.clone(), q_len);
        let zero = Tensor::<1, Int>::zeros([1], (&device, DType::from(INTS)));
        let of_rows = |of_sequences: Tensor<1, Int>| {
            // The table has one entry per sequence. An additional first entry is for rows before all sequences, and an
            // additional last entry is for rows after all sequences. These rows see no key: their range of keys is
            // `0..0`.
            let table = Tensor::cat(vec![zero.clone(), of_sequences, zero.clone()], 0);
            table.select(0, index.clone())
        };
        let position = rows + of_rows(shift);
        let mut start = of_rows(first(&key_bounds));
        let mut stop = of_rows(end(&key_bounds));
        // Clamp each side of the window to `q_len + kv_len`, so that the sum of position and window cannot overflow. A
        // window of this size still shows all keys.
        let reach = |keys: usize| keys.min(q_len + kv_len) as i64;
        if let Some(left) = options.window_left {
            start = start.max_pair(position.clone() - reach(left));
        }
        let right = match (options.causal, options.window_right) {
            (Some(_), _) => Some(0),
            (None, right) => right,
        };
        if let Some(right) = right {
            stop = stop.min_pair(position + (reach(right) + 1));
        }
        (start.unsqueeze(), stop.unsqueeze())
    }
}

/// Returns, for each row, the number of elements of the ascending `bounds` that are less than or equal to the row's index.
fn count_bounds(rows: Tensor<1, Int>, bounds: Tensor<1, Int>, q_len: usize) -> Tensor<1, Int> {
    let [count] = bounds.dims();
    let steps = usize::BITS - count.leading_zeros();
    // The binary search may read entries past the last of the `count` bounds. The bounds are therefore padded to a
    // power of two. The added bounds are above all rows.
    let place = (&rows.device(), DType::from(INTS));
    let above = Tensor::full([(1 << steps) - count], q_len as i64, place);
    let bounds = Tensor::cat(vec![bounds, above], 0);
    let mut found = rows.zeros_like();
    for step in (0..steps).rev() {
        let probe = found.clone() + (1 << step);
        let bound = bounds.clone().select(0, probe.clone() - 1);
        found = found.mask_where(bound.lower_equal(rows.clone()), probe);
    }
    found
}

/// Computes attention over packed sequences, by the fastest kernel that serves the problem on the tensors' device.
///
/// The [module's documentation](self) states the contract.
///
/// # Shapes
/// `query [q_len, q_heads, head_dim]`, `key [kv_len, kv_heads, head_dim]`, `value [kv_len, kv_heads, value_dim]` →
/// `[q_len, q_heads, value_dim]`, where the lengths count the tokens of all sequences.
///
/// # Panics
/// Panics with the text of [`AttentionError`] if an argument does not fit; [`try_varlen_attention`] returns the error instead.
pub fn varlen_attention(
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    sequences: &Sequences,
    options: AttentionOptions,
) -> Tensor<3> {
    match try_varlen_attention(query, key, value, sequences, options) {
        Ok((output, _)) => output,
        Err(error) => panic!("varlen_attention: {error}"),
    }
}

/// Computes [`varlen_attention`] and the logsumexp. Returns an error instead of a panic.
///
/// The logsumexp is `[q_heads, q_len]`, an f32 natural logarithm as in [`attention_with_lse`](crate::attention_with_lse). Both
/// results are differentiable.
///
/// # Errors
/// Returns [`AttentionError`] if an argument does not fit. The error messages give shapes as `[1, heads, tokens, columns]`.
pub fn try_varlen_attention(
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    sequences: &Sequences,
    options: AttentionOptions,
) -> Result<(Tensor<3>, Tensor<2>), AttentionError> {
    check_place_of(
        "cu_seqlens_q",
        sequences.cu_seqlens_q.device(),
        "query",
        &query.device(),
    )?;
    let options = sequences.options(query.dims()[0], key.dims()[0], options)?;
    // Kernels read tensors through their strides, so nothing is copied here.
    let heads_first = |rows: Tensor<3>| -> Tensor<4> {
        let [len, heads, columns] = rows.dims();
        let rows = rows.swap_dims(0, 1);
        match len * heads * columns {
            // Use `expand` for an empty tensor, because `unsqueeze` interprets a size of 0 as "keep the size of this
            // dimension".
            0 => rows.expand(Shape::new([1, heads, len, columns])),
            _ => rows.unsqueeze(),
        }
    };
    let (query, key, value) = (heads_first(query), heads_first(key), heads_first(value));
    let (result, problem) = attend(query, key, value, options)?;
    let (output, lse) = output_and_lse(result, &problem);
    let output: Tensor<3> = output.squeeze_dim(0);
    Ok((output.swap_dims(0, 1), lse.squeeze_dim(0)))
}
