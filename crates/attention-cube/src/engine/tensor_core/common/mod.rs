//! Device functions for all tensor-core engines that hold scores in accumulator registers (register fragments).
//!
//! A thread holds elements of two rows of a fragment, 8 rows apart, and a quarter of the columns of each row. The three
//! other threads of its quad hold the remaining columns.
//!
//! The rows of a fragment are queries or keys, as `FragmentKind::side` says. The columns are the *other side*: keys for
//! a tile of queries, queries for a tile of keys. A *register pair* is two adjacent registers of a thread. The two
//! registers hold two adjacent columns of one row.

pub(crate) mod bias;
pub(crate) mod block_mask;
pub(crate) mod block_range;
pub(crate) mod dropout;
pub(crate) mod far;
pub(crate) mod gradient;
pub(crate) mod gradient_launch;
pub(crate) mod launch;
pub(crate) mod mask;
pub(crate) mod output;
pub(crate) mod score;
pub(crate) mod score_mod;
pub(crate) mod scoring;
pub(crate) mod softcap;
pub(crate) mod softmax;
pub(crate) mod stationary_tile;
pub(crate) mod tile_scheduler;

use self::bias::{BiasReads, bias_row};
use self::scoring::Scoring;
use crate::math::lse_form::{LogsumexpForm, is_bounded};
use crate::math::score::{ScoreKind, is_hidden};
use crate::math::side::Side;
use crate::math::visibility::{Keys, SeqInfo, SeqLens, Structure, keys_of, queries_of};
use cube_kit::nvidia::Half;
use cube_kit::nvidia::accumulator::{Pair, column, is_second};
use cubecl::prelude::*;

/// The two fragment rows that a thread holds.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowPair {
    pub batch: u32,
    pub head_0: u32,
    pub head_1: u32,
    /// The index of the first row in its sequence, as a query or a key. A row past the end has the index `q_len` (for
    /// queries) or `kv_len` (for keys).
    pub position_0: i32,
    pub position_1: i32,
    pub seq_info: SeqInfo,
    /// The bias of the rows' head if the bias is one value per head, else 0.
    pub bias_of_head: f32,
}

/// The compile-time settings of a kernel that keeps scores in accumulator fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FragmentKind {
    /// Whether the rows of a fragment are queries or keys.
    pub side: Side,
    pub structure: Structure,
    pub score: ScoreKind,
    /// True if the kernel keeps unscaled dot products `q·k` in S, and applies the scale inside the exponential. This is
    /// possible only if the problem has no softcap, no bias and a positive scale.
    pub raw: bool,
    /// True if the backward multiplies P by the derivatives of softcap and score mod. The kernels of the gradients of the
    /// bias and of a table set this field to false. These gradients do not have the derivatives as factors, because the
    /// forward adds the bias and reads the table after the softcap.
    pub has_slope: bool,
    pub bias_reads: BiasReads,
}

impl FragmentKind {
    /// True if the kernel loads biases before the dot products `q·k` (S) are ready.
    pub(crate) const fn reads_ahead(&self) -> bool {
        matches!(self.bias_reads, BiasReads::Ahead(_))
    }

    /// Returns the half-precision type of the biases.
    ///
    /// # Panics
    /// Panics if the kernel does not load biases before the dot products `q·k` (S) are ready.
    pub(crate) fn half_of_bias(&self) -> Half {
        match self.bias_reads {
            BiasReads::Ahead(half) => half,
            BiasReads::There | BiasReads::OnceAHead => {
                unreachable!("`half_of_bias` is called only if `bias_reads` is `Ahead`")
            }
        }
    }

    /// True if all scores of a head have the same bias.
    pub(crate) const fn has_bias_of_head(&self) -> bool {
        matches!(self.bias_reads, BiasReads::OnceAHead)
    }

    /// True if the LSE of every query is stored as two f32: the reference (the row maximum) and the logarithm of
    /// row_sum. Otherwise only the LSE of a *far* query may take two f32 (see [`far`]).
    pub(crate) const fn has_logarithms(&self) -> bool {
        matches!(
            LogsumexpForm::of(
                self.raw,
                is_bounded(
                    self.score.softcap,
                    self.score.wide_softcap,
                    self.score.bias || self.score.score_mod.is_some()
                )
            ),
            LogsumexpForm::Apart
        )
    }

    /// True if each score has its own bias. A bias of −∞ can then hide a single key.
    pub(crate) const fn has_own_biases(&self) -> bool {
        self.score.bias && !self.has_bias_of_head()
    }

    /// True if a single key may be hidden by its own bias of −∞ or by the mask mod, even in a fully visible block.
    pub(crate) const fn hides_single_keys(&self) -> bool {
        self.has_own_biases() || self.score.mask_mod.is_some()
    }
}

/// Returns the first column of the thread's `pair`-th register pair. The fragment starts at column `first_column`.
#[cube]
pub(crate) fn own_column(first_column: i32, #[comptime] pair: usize) -> i32 {
    first_column + ((UNIT_POS % 4u32) * 2u32) as i32 + comptime!(column(2 * pair) as i32)
}

/// The range of columns that each of the thread's two rows sees. Also, for each row, the offset in elements of the
/// row's first bias.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Known {
    pub run_0: Keys,
    pub run_1: Keys,
    pub bias_0: usize,
    pub bias_1: usize,
    pub bias_of_head: f32,
    pub rows: RowPair,
    /// The first column of the problem's last pair of columns. A pair past the end reads the biases of this last pair.
    pub last_pair: u32,
}

#[cube]
pub(crate) fn known<F: Float, NB: Size>(
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    #[comptime] kind: FragmentKind,
) -> Known {
    let seq_lens = &scoring.masking.seq_lens;
    // A row past the end reads the bias of the last row, which keeps the read inside the bias tensor. The kernel later hides
    // the scores of this row.
    let last_row = rows_end(seq_lens, kind.side) - 1i32;
    let row_0 = min(rows.position_0, last_row) as u32;
    let row_1 = min(rows.position_1, last_row) as u32;
    let mut run_0 = run_of(&rows.seq_info, rows.position_0, kind.side);
    let mut run_1 = run_of(&rows.seq_info, rows.position_1, kind.side);
    if comptime!(kind.has_bias_of_head()) {
        let hidden = is_hidden(rows.bias_of_head);
        run_0.end = select(hidden, run_0.first, run_0.end);
        run_1.end = select(hidden, run_1.first, run_1.end);
    }
    Known {
        run_0,
        run_1,
        bias_0: bias_row(&scoring.bias, rows.batch, rows.head_0, row_0),
        bias_1: bias_row(&scoring.bias, rows.batch, rows.head_1, row_1),
        bias_of_head: rows.bias_of_head,
        rows: RowPair {
            batch: rows.batch,
            head_0: rows.head_0,
            head_1: rows.head_1,
            position_0: rows.position_0,
            position_1: rows.position_1,
            seq_info: rows.seq_info,
            bias_of_head: rows.bias_of_head,
        },
        last_pair: ((columns_end(seq_lens, kind.side) - 1i32) / 2i32 * 2i32) as u32,
    }
}

/// Returns the number of rows in the problem: `q_len` if the rows are queries, else `kv_len`.
#[cube]
pub(crate) fn rows_end(seq_lens: &SeqLens, #[comptime] side: Side) -> i32 {
    if comptime!(side == Side::Queries) {
        seq_lens.q_len
    } else {
        seq_lens.kv_len
    }
}

/// Returns the number of columns in the problem: `kv_len` if the rows are queries, else `q_len`.
#[cube]
pub(crate) fn columns_end(seq_lens: &SeqLens, #[comptime] side: Side) -> i32 {
    if comptime!(side == Side::Queries) {
        seq_lens.kv_len
    } else {
        seq_lens.q_len
    }
}

/// Returns the range of columns that window and sequence length leave visible to the row at `position`.
#[cube]
fn run_of(seq_info: &SeqInfo, position: i32, #[comptime] side: Side) -> Keys {
    if comptime!(side == Side::Queries) {
        keys_of(seq_info, position)
    } else {
        queries_of(seq_info, position)
    }
}

/// Returns `values`, the two scores of the `pair`-th register pair, with `hidden` in place of the score of a hidden
/// column. `at` is the pair's first column. With a mask, segments or key intervals, `bits` decides which columns are
/// visible. Otherwise the row's visible range decides.
#[cube]
pub(crate) fn shown(
    values: Pair,
    known: &Known,
    bits: u32,
    at: i32,
    hidden: f32,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) -> Pair {
    let run = if comptime!(is_second(2 * pair)) {
        known.run_1
    } else {
        known.run_0
    };
    let mut first = at >= run.first && at < run.end;
    let mut second = at + 1i32 >= run.first && at + 1i32 < run.end;
    if comptime!(kind.structure.is_irregular()) {
        first = bits & comptime!(1u32 << (column(2 * pair) % 32)) != 0u32;
        second = bits & comptime!(2u32 << (column(2 * pair) % 32)) != 0u32;
    }
    Pair {
        first: select(first, values.first, hidden),
        second: select(second, values.second, hidden),
    }
}

/// Extracts the `pair`-th register pair of S.
#[cube]
pub(crate) fn pair_of<NS: Size>(s: Vector<f32, NS>, #[comptime] pair: usize) -> Pair {
    Pair {
        first: s.extract(comptime!(2 * pair)),
        second: s.extract(comptime!(2 * pair + 1)),
    }
}
