//! Attention on an accumulator's registers, which threads hold by fragments: a thread has two rows, 8 apart, and a quarter of
//! their columns; the three others are its neighbours. What tiles of such rows visit, see and write is the same for all engines
//! that have them.

pub(crate) mod bias;
pub(crate) mod far;
pub(crate) mod gradient;
pub(crate) mod launch;
pub(crate) mod mask;
pub(crate) mod output;
pub(crate) mod score;
pub(crate) mod scoring;
pub(crate) mod softcap;
pub(crate) mod softmax;
pub(crate) mod stationary;
pub(crate) mod view;
pub(crate) mod visits;
pub(crate) mod work_tile;

use self::bias::{BiasReads, bias_row};
use self::scoring::Scoring;
use crate::math::score::{ScoreKind, is_hidden};
use crate::math::side::Side;
use crate::math::visibility::{Extent, Keys, Sight, Structure, keys_of, queries_of};
use crate::passes::delta::form::LogsumexpForm;
use cube_kit::hopper::Half;
use cube_kit::hopper::accumulator::{Pair, column, is_second};
use cubecl::prelude::*;

/// A thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct RowPair {
    pub batch: u32,
    pub head_0: u32,
    pub head_1: u32,
    /// Queries, or keys where the fragment's rows are keys; their number, where the row does not exist.
    pub position_0: i32,
    pub position_1: i32,
    pub sight: Sight,
    /// Where a bias is one number a head, that of both rows' head.
    pub bias_of_head: f32,
}

/// What is compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FragmentKind {
    /// What the rows are.
    pub side: Side,
    pub structure: Structure,
    pub score: ScoreKind,
    /// The score is the product, to be scaled in the exponential: no softcap, no bias, a positive scale.
    pub raw: bool,
    /// The backward's weights have the softcap's slope. The bias gradient has none: a bias is added after the softcap.
    pub has_slope: bool,
    pub bias_reads: BiasReads,
}

impl FragmentKind {
    /// Whether the forward has biases before the scores are there.
    pub(crate) const fn reads_ahead(&self) -> bool {
        matches!(self.bias_reads, BiasReads::Ahead(_))
    }

    /// The precision of biases that are read ahead.
    pub(crate) fn half_of_bias(&self) -> Half {
        match self.bias_reads {
            BiasReads::Ahead(half) => half,
            BiasReads::There | BiasReads::OnceAHead => {
                unreachable!("asked only where biases are read ahead")
            }
        }
    }

    /// Whether the bias is one number for all scores of a head.
    pub(crate) const fn has_bias_of_head(&self) -> bool {
        matches!(self.bias_reads, BiasReads::OnceAHead)
    }

    /// Whether the backward has logsumexps in two numbers throughout; see [`far`] for those that are marked.
    pub(crate) const fn has_logarithms(&self) -> bool {
        matches!(
            LogsumexpForm::of(self.raw, self.score),
            LogsumexpForm::Apart
        )
    }

    /// Whether scores have biases of their own, each of which may hide its key.
    pub(crate) const fn has_own_biases(&self) -> bool {
        self.score.bias && !self.has_bias_of_head()
    }
}

/// The column of a thread's `pair`-th two registers.
#[cube]
pub(crate) fn own_column(first_column: i32, #[comptime] pair: usize) -> i32 {
    first_column + ((UNIT_POS % 4u32) * 2u32) as i32 + comptime!(column(2 * pair) as i32)
}

/// What a thread's rows see, and where their biases are.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Known {
    pub run_0: Keys,
    pub run_1: Keys,
    pub bias_0: usize,
    pub bias_1: usize,
    pub bias_of_head: f32,
    /// The last pair of columns that exists, of which the second may not.
    pub last_pair: u32,
}

#[cube]
pub(crate) fn known<F: Float, NB: Size>(
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    #[comptime] kind: FragmentKind,
) -> Known {
    let extent = &scoring.masking.extent;
    // Of a row that does not exist, another's are read, and hidden.
    let last_row = rows_end(extent, kind.side) - 1i32;
    let row_0 = min(rows.position_0, last_row) as u32;
    let row_1 = min(rows.position_1, last_row) as u32;
    let mut run_0 = run_of(&rows.sight, rows.position_0, kind.side);
    let mut run_1 = run_of(&rows.sight, rows.position_1, kind.side);
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
        last_pair: ((columns_end(extent, kind.side) - 1i32) / 2i32 * 2i32) as u32,
    }
}

/// How many rows there are.
#[cube]
pub(crate) fn rows_end(extent: &Extent, #[comptime] side: Side) -> i32 {
    if comptime!(side == Side::Queries) {
        extent.q_len
    } else {
        extent.kv_len
    }
}

/// How many columns there are.
#[cube]
pub(crate) fn columns_end(extent: &Extent, #[comptime] side: Side) -> i32 {
    if comptime!(side == Side::Queries) {
        extent.kv_len
    } else {
        extent.q_len
    }
}

/// What the row at `position` sees, or what sees it, by window and length.
#[cube]
fn run_of(sight: &Sight, position: i32, #[comptime] side: Side) -> Keys {
    if comptime!(side == Side::Queries) {
        keys_of(sight, position)
    } else {
        queries_of(sight, position)
    }
}

/// The `pair`-th two registers' values, `hidden` where the row does not see the column. `bits` have what mask and segments
/// show, restricted to the run.
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

/// Two registers of S.
#[cube]
pub(crate) fn pair_of<NS: Size>(s: Vector<f32, NS>, #[comptime] pair: usize) -> Pair {
    Pair {
        first: s.extract(comptime!(2 * pair)),
        second: s.extract(comptime!(2 * pair + 1)),
    }
}
