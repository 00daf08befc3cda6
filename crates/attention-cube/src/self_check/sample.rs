//! The small problem of the self-check, and its inputs.

use crate::math::dropout::{bits, head_key};
use crate::options::CausalAlignment;
use crate::problem::AttentionProblem;
use crate::tile_ops::tiles::UnitTiles;
use burn::tensor::{DType, bf16, f16};

/// The sizes of a sample that do not follow from the problem at hand.
#[derive(Clone, Copy)]
pub(super) struct Lengths {
    pub q_len: usize,
    pub kv_len: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
}

/// Returns a causal problem of other lengths, with the dtype and the head sizes of `problem`.
pub(super) fn causal_problem(problem: &AttentionProblem, lengths: Lengths) -> AttentionProblem {
    AttentionProblem {
        batch: 1,
        q_heads: lengths.q_heads,
        kv_heads: lengths.kv_heads,
        q_len: lengths.q_len,
        kv_len: lengths.kv_len,
        head_dim: problem.head_dim,
        value_dim: problem.value_dim,
        dtype: problem.dtype,
        scale: 1.0 / (problem.head_dim as f64).sqrt(),
        softcap: None,
        causal: Some(CausalAlignment::BottomRight),
        window_left: None,
        window_right: None,
        mask: None,
        mask_block: [1, 1],
        bias: None,
        kv_lengths: false,
        kv_lengths_ahead: false,
        query_lengths: false,
        segments: false,
        intervals: 0,
        sinks: None,
        dropout: None,
        score_mod: None,
        mask_mod: None,
        page_len: None,
        quantized: None,
    }
}

/// A problem with one key head, and its inputs. The inputs are rounded to the problem's dtype.
pub(super) struct Sample {
    pub problem: AttentionProblem,
    /// `[q_heads, q_len, head_dim]`.
    pub query: Vec<f64>,
    /// `[kv_len, head_dim]`.
    pub key: Vec<f64>,
    /// `[kv_len, value_dim]`.
    pub value: Vec<f64>,
    /// `[q_heads, q_len, value_dim]`.
    pub output_gradient: Vec<f64>,
}

/// The growth of the scores from the first key to the last. The kernels keep a row maximum until P exceeds 2⁸ and then
/// rescale O, so the growth must be well above 8 ln 2.
const SCORE_GROWTH: f64 = 16.0;

/// The number of queries of each head in the sample of a decode tile. Several queries see different keys.
const DECODE_QUERIES: usize = 2;

impl Sample {
    /// Returns the sample for a decode tile, in which the heads of a group share the rows.
    ///
    /// The sample fills every row of the tile, because the verdict also holds for calls with more rows than `problem`.
    pub fn of_decode(problem: &AttentionProblem, tiles: &UnitTiles) -> Self {
        Self::new(causal_problem(
            problem,
            Lengths {
                q_len: DECODE_QUERIES,
                kv_len: 3 * tiles.columns() + 5,
                q_heads: tiles.rows / DECODE_QUERIES,
                kv_heads: 1,
            },
        ))
    }

    /// Returns the sample for kernels that keep at most `queries` queries and `keys` keys at a time.
    pub fn of_rows(problem: &AttentionProblem, queries: usize, keys: usize) -> Self {
        let q_len = queries + queries / 2 + 1;
        let kv_len = 2 * keys + keys / 2 + 3;
        Self::new(causal_problem(
            problem,
            Lengths {
                q_len,
                kv_len: kv_len.max(q_len),
                q_heads: 2,
                kv_heads: 1,
            },
        ))
    }

    fn new(problem: AttentionProblem) -> Self {
        let AttentionProblem {
            q_heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            dtype,
            ..
        } = problem;
        let random = |seed: u64, rows: usize, columns: usize, ramp: &dyn Fn(usize) -> f64| {
            let key = head_key(seed, 0);
            let at = |index: usize| {
                let (row, column) = (index / columns, index % columns);
                let uniform = f64::from(bits(key, row as u32, column as u32)) / 32_768.0 - 1.0;
                round(uniform + ramp(row), dtype)
            };
            (0..rows * columns).map(at).collect::<Vec<f64>>()
        };
        // The mean of the queries is 1, so a ramp of the keys lets the scores grow by about `SCORE_GROWTH`.
        let slope = SCORE_GROWTH / (head_dim as f64).sqrt() / kv_len as f64;
        Self {
            query: random(1, q_heads * q_len, head_dim, &|_| 1.0),
            key: random(2, kv_len, head_dim, &|row| slope * row as f64),
            value: random(3, kv_len, value_dim, &|_| 0.0),
            output_gradient: random(4, q_heads * q_len, value_dim, &|_| 0.0),
            problem,
        }
    }
}

/// Rounds a number to f16 or bf16.
///
/// # Panics
/// Panics for other dtypes, which the cmma engine refuses.
pub(super) fn round(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::BF16 => bf16::from_f64(x).to_f64(),
        other => panic!("the cmma engine refuses {other:?}"),
    }
}
