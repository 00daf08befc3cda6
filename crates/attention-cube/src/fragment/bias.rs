//! Biases of a fragment's scores.
//!
//! Where biases lie by twos in half precision, a thread has all of a block's before the scores are there, a word for two of
//! them, so that their way from memory is hidden behind the products. A warp's words are 8 rows of 16 bytes, for which the L1
//! cache takes 8 accesses: the copy engine brings them eight times as fast, where it can and there is room for them. A bias of
//! −∞ hides its key whatever the score is, also one that is no number; a block without any, of which the smallest tells, spares
//! the question for each.

use super::scoring::Scoring;
use super::softcap::capped;
use super::{FragmentKind, Known, RowPair, columns_end, own_column, pair_of, rows_end};
use crate::math::score::{LOWEST, ScoreArguments, plus_bias};
use cube_kit::hopper::Half;
use cube_kit::hopper::accumulator::{Pair, is_second};
use cube_kit::hopper::ptx::{load_word, smaller_halves, unpack, word_address};
use cubecl::prelude::*;

/// How a kernel reads a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BiasReads {
    /// Where its score is made, in any precision and by any strides.
    There,
    /// By words of two neighbours in half precision, before the scores are there: from memory, or where the tiles have
    /// stages of biases, from boxes that the copy engine brings.
    Ahead(Half),
    /// Once a tile, since it is one number a head. One of −∞ hides everything from its head, like a run without keys.
    OnceAHead,
}

/// A thread's biases of a block of up to 128 columns, two in a word, in the order of its pairs of registers.
pub(crate) type BiasWords = Vector<u32, Const<32>>;

/// A thread's biases of `columns` columns from `first_column` on, where these are read ahead. Of a row or a column that does
/// not exist, another's.
#[cube]
pub(crate) fn bias_words<F: Float, NB: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    first_column: i32,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> BiasWords {
    let bias = &scoring.bias;
    let extent = &scoring.masking.extent;
    let mut words = BiasWords::zeroed();
    let last_row = rows_end(extent, kind.side) - 1i32;
    let row_0 = min(rows.position_0, last_row) as u32;
    let row_1 = min(rows.position_1, last_row) as u32;
    let start_0 = bias_row::<F, NB>(bias, rows.batch, rows.head_0, row_0) / 2;
    let start_1 = bias_row::<F, NB>(bias, rows.batch, rows.head_1, row_1) / 2;
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            if comptime!(kind.reads_ahead()) {
                let end = columns_end(extent, kind.side);
                if first_column + comptime!(columns as i32) <= end {
                    let own = own_column(first_column, 0usize) as usize / 2;
                    // SAFETY: only addresses are taken; rows and columns were brought inside the tensor.
                    let start = unsafe { bias.as_slice().as_ptr_unchecked() };
                    let own_0 = word_address::<Vector<F, NB>>(start, (start_0 + own) as u64);
                    let own_1 = word_address::<Vector<F, NB>>(start, (start_1 + own) as u64);
                    #[unroll]
                    for pair in 0..columns / 4 {
                        let after = comptime!(pair / 2 * 4);
                        let row = if comptime!(is_second(2 * pair)) {
                            own_1
                        } else {
                            own_0
                        };
                        words.insert(pair, load_word(row, after));
                    }
                } else {
                    let last = (end - 1i32) as usize / 2;
                    #[unroll]
                    for pair in 0..columns / 4 {
                        let own = min(own_column(first_column, pair) as usize / 2, last);
                        let both = if comptime!(is_second(2 * pair)) {
                            bias[start_1 + own]
                        } else {
                            bias[start_0 + own]
                        };
                        words.insert(pair, u32::reinterpret(both));
                    }
                }
            }
        }
        ComptimeOption::None => {}
    }
    words
}

/// Whether the bias hides one of a row's `columns` columns from `first_column` on, of those that this lane looks at. The row and
/// the columns exist.
#[cube]
pub(crate) fn lane_hides<F: Float, NB: Size>(
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    batch: u32,
    head: u32,
    row: u32,
    first_column: i32,
    #[comptime] columns: usize,
) -> bool {
    let row = bias_row::<F, NB>(bias, batch, head, row);
    let lane = UNIT_POS % 32u32;
    let mut smallest = f32::new(0.0);
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            let vector = bias.vector_size();
            #[unroll]
            for part in 0..comptime!(columns.div_ceil(32 * vector)) {
                let index = (lane + comptime!(32 * part as u32)) * comptime!(vector as u32);
                // Behind the last column comes the last once more.
                let index = min(index, comptime!((columns - vector) as u32));
                let column = first_column as usize + index as usize;
                let values = bias[(row + column * bias.stride(3)) / vector];
                #[unroll]
                for i in 0..vector {
                    smallest = min(smallest, f32::cast_from(values.extract(i)));
                }
            }
        }
        ComptimeOption::None => {}
    }
    smallest < LOWEST
}

/// The scores of a block's dots by the biases that were read ahead.
#[cube]
pub(crate) fn add_words<NS: Size>(
    s: Vector<f32, NS>,
    words: BiasWords,
    arguments: &ScoreArguments,
    #[comptime] columns: usize,
    #[comptime] half: Half,
    #[comptime] kind: FragmentKind,
) -> Vector<f32, NS> {
    let mut s = s;
    let mut smallest_0 = words.extract(0usize);
    let mut smallest_1 = words.extract(1usize);
    #[unroll]
    for pair in 0..columns / 4 {
        let word = words.extract(pair);
        if comptime!(is_second(2 * pair)) {
            smallest_1 = smaller_halves(smallest_1, word, half);
        } else {
            smallest_0 = smaller_halves(smallest_0, word, half);
        }
        let dots = pair_of::<NS>(s, pair);
        let biases = unpack(word, half);
        let first = biases.extract(0usize);
        let second = biases.extract(1usize);
        if comptime!(kind.score.softcap) {
            let capped = capped(dots, arguments, kind.score);
            s.insert(comptime!(2 * pair), capped.first + first);
            s.insert(comptime!(2 * pair + 1), capped.second + second);
        } else {
            s.insert(comptime!(2 * pair), fma(dots.first, arguments.scale, first));
            s.insert(
                comptime!(2 * pair + 1),
                fma(dots.second, arguments.scale, second),
            );
        }
    }
    let smallest = unpack(smaller_halves(smallest_0, smallest_1, half), half);
    if plane_any(min(smallest.extract(0usize), smallest.extract(1usize)) < LOWEST) {
        #[unroll]
        for pair in 0..columns / 4 {
            let biases = unpack(words.extract(pair), half);
            let values = pair_of::<NS>(s, pair);
            let hidden = arguments.negative_infinity;
            s.insert(
                comptime!(2 * pair),
                select(biases.extract(0usize) < LOWEST, hidden, values.first),
            );
            s.insert(
                comptime!(2 * pair + 1),
                select(biases.extract(1usize) < LOWEST, hidden, values.second),
            );
        }
    }
    s
}

/// The scores of the `pair`-th two registers with their biases, of the columns from `at` on. Two biases are read
/// at once where they lie together.
#[cube]
pub(crate) fn with_bias<F: Float, NB: Size>(
    capped: Pair,
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    known: &Known,
    at: u32,
    hidden: f32,
    #[comptime] pair: usize,
    #[comptime] kind: FragmentKind,
) -> Pair {
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            if comptime!(kind.has_bias_of_head()) {
                Pair {
                    first: capped.first + known.bias_of_head,
                    second: capped.second + known.bias_of_head,
                }
            } else {
                let row = if comptime!(is_second(2 * pair)) {
                    known.bias_1
                } else {
                    known.bias_0
                };
                let vector = bias.vector_size();
                if comptime!(vector == 2) {
                    let both = bias[(row + at as usize) / 2];
                    Pair {
                        first: plus_bias(
                            capped.first,
                            f32::cast_from(both.extract(0usize)),
                            hidden,
                        ),
                        second: plus_bias(
                            capped.second,
                            f32::cast_from(both.extract(1usize)),
                            hidden,
                        ),
                    }
                } else {
                    let own = row + at as usize * bias.stride(3);
                    // The last column may have no neighbour.
                    let next = select(at + 1u32 < bias.shape(3) as u32, own + bias.stride(3), own);
                    let first = f32::cast_from(bias[own].extract(0usize));
                    let second = f32::cast_from(bias[next].extract(0usize));
                    Pair {
                        first: plus_bias(capped.first, first, hidden),
                        second: plus_bias(capped.second, second, hidden),
                    }
                }
            }
        }
        ComptimeOption::None => capped,
    }
}

/// The bias of a head, where it is one number for all of its scores; else 0.
#[cube]
pub(crate) fn bias_of_head<F: Float, NB: Size>(
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    batch: u32,
    head: u32,
    #[comptime] kind: FragmentKind,
) -> f32 {
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            if comptime!(kind.has_bias_of_head()) {
                let own = batch as usize * bias.stride(0) + head as usize * bias.stride(1);
                f32::cast_from(bias[own].extract(0usize))
            } else {
                f32::new(0.0)
            }
        }
        ComptimeOption::None => f32::new(0.0),
    }
}

/// Where a row's biases start, in elements; 0 without a bias.
#[cube]
pub(crate) fn bias_row<F: Float, NB: Size>(
    bias: &ComptimeOption<&Tensor<Vector<F, NB>>>,
    batch: u32,
    head: u32,
    row: u32,
) -> usize {
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            batch as usize * bias.stride(0)
                + head as usize * bias.stride(1)
                + row as usize * bias.stride(2)
        }
        ComptimeOption::None => 0usize.runtime(),
    }
}
