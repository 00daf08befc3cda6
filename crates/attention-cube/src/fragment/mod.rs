//! Scores on an accumulator's registers, which a warpgroup's threads hold by fragments: a thread has two rows, 8
//! apart, and a quarter of their columns; the three others are its neighbours.

pub(crate) mod bias;
pub(crate) mod gradient;
pub(crate) mod softmax;

use crate::fragment::bias::{BiasReads, BiasWords, add_words, bias_row, with_bias};
use crate::math::score::{ScoreArguments, ScoreKind, is_hidden, widely_capped};
use crate::math::side::Side;
use crate::math::visibility::{
    Documents, Extent, Keys, Sight, Structure, id_of, keys_of, queries_of,
};
use crate::passes::mask_bits::kernel::{MaskPlaces, bits_of_run, word_of};
use cube_kit::hopper::Half;
use cube_kit::hopper::accumulator::{Pair, column, is_second};
use cube_kit::hopper::ptx::{exp2, reciprocal, smaller_or_none};
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

    /// Whether the backward has logsumexps in two numbers: by biases scores may be so large that one does not keep how many there were.
    pub(crate) const fn has_logarithms(&self) -> bool {
        self.score.bias
    }

    /// Whether scores have biases of their own, each of which may hide its key.
    pub(crate) const fn has_own_biases(&self) -> bool {
        self.score.bias && !self.has_bias_of_head()
    }
}

/// The scores of `columns` columns from `first_column` on, −∞ where hidden. In a `whole` block nothing is, but by
/// a bias.
#[cube]
pub(crate) fn score<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    first_column: i32,
    whole: bool,
    rows: &RowPair,
    mask_words: MaskWords,
    bias_words: BiasWords,
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    sight: &Sight,
    extent: &Extent,
    arguments: &ScoreArguments,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> Vector<f32, NS> {
    let mut s = scored::<F, NB, NS>(
        s,
        first_column,
        whole,
        rows,
        bias_words,
        bias,
        sight,
        extent,
        arguments,
        columns,
        kind,
    );
    if !whole {
        let known = known::<F, NB>(rows, bias, sight, extent, kind);
        let mut bits_0 = u32::new(0);
        let mut bits_1 = u32::new(0);
        #[unroll]
        for pair in 0..columns / 4 {
            if comptime!(kind.structure.is_irregular() && pair % PAIRS_PER_WORD == 0) {
                let bits = bits_of_word(
                    mask_words,
                    &known,
                    first_column,
                    comptime!(pair / PAIRS_PER_WORD),
                );
                bits_0 = bits.first;
                bits_1 = bits.second;
            }
            let shown = shown(
                pair_of::<NS>(s, pair),
                &known,
                if comptime!(is_second(2 * pair)) {
                    bits_1
                } else {
                    bits_0
                },
                own_column(first_column, pair),
                arguments.negative_infinity,
                pair,
                kind,
            );
            s.insert(comptime!(2 * pair), shown.first);
            s.insert(comptime!(2 * pair + 1), shown.second);
        }
    }
    s
}

/// The scores of the dots `s`, or these where they wait for their scale, whoever sees what.
#[cube]
fn scored<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    first_column: i32,
    whole: bool,
    rows: &RowPair,
    bias_words: BiasWords,
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    sight: &Sight,
    extent: &Extent,
    arguments: &ScoreArguments,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> Vector<f32, NS> {
    let mut s = s;
    if comptime!(kind.reads_ahead()) {
        let half = comptime!(kind.half_of_bias());
        s = add_words::<NS>(s, bias_words, arguments, columns, half, kind);
    } else if comptime!(!kind.raw) {
        // Where everybody sees everything, a score that is no number may take its neighbour along: the row is lost
        // either way.
        let pairs = comptime!(kind.score.softcap && !kind.score.wide_softcap && !kind.score.bias);
        let together = if comptime!(pairs) {
            whole
        } else {
            false.runtime()
        };
        if together {
            #[unroll]
            for pair in 0..columns / 4 {
                let values = capped_together(pair_of::<NS>(s, pair), arguments);
                s.insert(comptime!(2 * pair), values.first);
                s.insert(comptime!(2 * pair + 1), values.second);
            }
        } else {
            let known = known::<F, NB>(rows, bias, sight, extent, kind);
            #[unroll]
            for pair in 0..columns / 4 {
                let capped = capped(pair_of::<NS>(s, pair), arguments, kind.score);
                let existing = min(own_column(first_column, pair) as u32, known.last_pair);
                let hidden = arguments.negative_infinity;
                let values = with_bias::<F, NB>(capped, bias, &known, existing, hidden, pair, kind);
                s.insert(comptime!(2 * pair), values.first);
                s.insert(comptime!(2 * pair + 1), values.second);
            }
        }
    }
    s
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
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    sight: &Sight,
    extent: &Extent,
    #[comptime] kind: FragmentKind,
) -> Known {
    // Of a row that does not exist, another's are read, and hidden.
    let last_row = rows_end(extent, kind.side) - 1i32;
    let row_0 = min(rows.position_0, last_row) as u32;
    let row_1 = min(rows.position_1, last_row) as u32;
    let mut run_0 = run_of(sight, rows.position_0, kind.side);
    let mut run_1 = run_of(sight, rows.position_1, kind.side);
    if comptime!(kind.has_bias_of_head()) {
        let hidden = is_hidden(rows.bias_of_head);
        run_0.end = select(hidden, run_0.first, run_0.end);
        run_1.end = select(hidden, run_1.first, run_1.end);
    }
    Known {
        run_0,
        run_1,
        bias_0: bias_row(bias, rows.batch, rows.head_0, row_0),
        bias_1: bias_row(bias, rows.batch, rows.head_1, row_1),
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

/// Bits of the thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BitPair {
    pub first: u32,
    pub second: u32,
}

/// What the rows see of the columns of the fragment's `word`-th 32, from the thread's own on.
#[cube]
pub(crate) fn bits_of_word(
    mask_words: MaskWords,
    known: &Known,
    first_column: i32,
    #[comptime] word: usize,
) -> BitPair {
    let first = first_column + comptime!(32 * word as i32);
    let shift = UNIT_POS % 4u32 * 2u32;
    let own_0 = mask_words.extract(comptime!(2 * word));
    let own_1 = mask_words.extract(comptime!(2 * word + 1));
    BitPair {
        first: (own_0 & bits_of_run(known.run_0, first)) >> shift,
        second: (own_1 & bits_of_run(known.run_1, first)) >> shift,
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

/// What mask and segments show to a thread's two rows of up to 128 keys, a bit a key.
pub(crate) type MaskWords = Vector<u32, Const<8>>;

/// A thread's words of the mask for `columns` keys from the `first_word`-th on.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(crate) fn mask_words(
    mask: &ComptimeOption<&Tensor<u32>>,
    places: &MaskPlaces,
    rows: &RowPair,
    extent: &Extent,
    first_word: u32,
    whole: bool,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> MaskWords {
    let mut words = Vector::<u32, Const<8>>::zeroed();
    if comptime!(kind.structure.mask) {
        if !whole {
            let last_row = rows_end(extent, kind.side) - 1i32;
            let row_0 = min(rows.position_0, last_row) as u32;
            let row_1 = min(rows.position_1, last_row) as u32;
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                let at = first_word + comptime!(word as u32);
                let own_0 = word_of(mask, places, rows.batch, rows.head_0, row_0, at);
                let own_1 = word_of(mask, places, rows.batch, rows.head_1, row_1, at);
                words.insert(comptime!(2 * word), own_0);
                words.insert(comptime!(2 * word + 1), own_1);
            }
        }
    }
    words
}

/// The words without what segments hide of `columns` columns from `first_column` on, of those that the thread has, in a block of
/// these `documents`. Where the tile and the block `share` one document, this is nothing; where the block is of one, all or nothing
/// of a row.
#[cube]
pub(crate) fn words_of_segments(
    words: MaskWords,
    lengths_and_ids: &ComptimeOption<&Tensor<i32>>,
    rows: &RowPair,
    extent: &Extent,
    first_column: i32,
    documents: Documents,
    share: bool,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> MaskWords {
    let mut words = words;
    if comptime!(!kind.structure.mask) {
        #[unroll]
        for word in 0..comptime!(2 * columns.div_ceil(32)) {
            words.insert(word, 0xffff_ffffu32);
        }
    }
    if !share {
        let side = comptime!(kind.side);
        let other = comptime!(side.other());
        let last_row = rows_end(extent, side) - 1i32;
        let last_column = columns_end(extent, side) - 1i32;
        let id_0 = id_of(
            extent,
            lengths_and_ids,
            rows.batch,
            min(rows.position_0, last_row),
            side,
        );
        let id_1 = id_of(
            extent,
            lengths_and_ids,
            rows.batch,
            min(rows.position_1, last_row),
            side,
        );
        let is_one = documents.first == documents.last;
        let shift = UNIT_POS % 4u32 * 2u32;
        let mut all_0 = u32::new(0);
        let mut all_1 = u32::new(0);
        if is_one {
            all_0 = select(documents.first == id_0, 0xffff_ffffu32, 0u32);
            all_1 = select(documents.first == id_1, 0xffff_ffffu32, 0u32);
        }
        #[unroll]
        for word in 0..columns.div_ceil(32) {
            let mut own_0 = all_0;
            let mut own_1 = all_1;
            if !is_one {
                // A thread has two neighbours of every 8 columns.
                #[unroll]
                for index in 0..comptime!((columns - 32 * word).min(32) / 4) {
                    let bit = comptime!(index / 2 * 8 + index % 2);
                    let own = first_column + shift as i32 + comptime!((32 * word + bit) as i32);
                    let id = id_of(
                        extent,
                        lengths_and_ids,
                        rows.batch,
                        min(own, last_column),
                        other,
                    );
                    own_0 |= select(id == id_0, comptime!(1u32 << bit), 0u32);
                    own_1 |= select(id == id_1, comptime!(1u32 << bit), 0u32);
                }
                own_0 <<= shift;
                own_1 <<= shift;
            }
            let word_0 = words.extract(comptime!(2 * word));
            let word_1 = words.extract(comptime!(2 * word + 1));
            words.insert(comptime!(2 * word), word_0 & own_0);
            words.insert(comptime!(2 * word + 1), word_1 & own_1);
        }
    }
    words
}

/// Pairs of registers that the keys of a word of the mask take: two rows, and a quarter of the columns.
pub(crate) const PAIRS_PER_WORD: usize = 8;

/// Two registers of S.
#[cube]
pub(crate) fn pair_of<NS: Size>(s: Vector<f32, NS>, #[comptime] pair: usize) -> Pair {
    Pair {
        first: s.extract(comptime!(2 * pair)),
        second: s.extract(comptime!(2 * pair + 1)),
    }
}

/// The scores without bias.
#[cube]
pub(crate) fn capped(dots: Pair, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> Pair {
    Pair {
        first: cap(dots.first, arguments, kind),
        second: cap(dots.second, arguments, kind),
    }
}

/// The score without bias. The hyperbolic tangent by an exponential and a reciprocal: its absolute error is a
/// few units in the last place of 1, which the exponential of a score does not tell from the exact one.
#[cube]
fn cap(dot: f32, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> f32 {
    if comptime!(kind.softcap) {
        let below = reciprocal(exp2(dot * softcap_power(arguments)) + 1.0f32);
        if comptime!(kind.wide_softcap) {
            // Twice the softcap may be infinite.
            let far = fma(below, -2.0f32, 1.0f32) * arguments.softcap;
            widely_capped(dot * arguments.scale, far, arguments.softcap)
        } else {
            fma(below, -2.0f32 * arguments.softcap, arguments.softcap)
        }
    } else {
        dot * arguments.scale
    }
}

/// `2 / c` of a scaled dot, in powers of two.
#[cube]
fn softcap_power(arguments: &ScoreArguments) -> f32 {
    comptime!(2.0 * std::f32::consts::LOG2_E) * arguments.scale / arguments.softcap
}

/// From this power of two on, `tanh` is 1 in f32; twice of it is far from f32's largest.
const CAPPED: f32 = 60.0;

/// Two capped scores by one reciprocal, `1 / a = b · 1 / (a b)`, since the unit that makes reciprocals and exponentials bounds
/// the softcap. If one is no number, both become none.
#[cube]
fn capped_together(dots: Pair, arguments: &ScoreArguments) -> Pair {
    let power = softcap_power(arguments);
    let first = exp2(smaller_or_none(dots.first * power, CAPPED)) + 1.0f32;
    let second = exp2(smaller_or_none(dots.second * power, CAPPED)) + 1.0f32;
    let both = reciprocal(first * second);
    let slope = -2.0f32 * arguments.softcap;
    Pair {
        first: fma(second * both, slope, arguments.softcap),
        second: fma(first * both, slope, arguments.softcap),
    }
}
