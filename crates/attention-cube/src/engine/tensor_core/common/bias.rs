//! The biases of a fragment's scores.
//!
//! If registers suffice, a thread loads all biases of a block before the GEMM of `q·k` has finished. The GEMM then
//! hides the latency of the loads. The early load requires half-precision biases in which each pair of adjacent columns
//! is an aligned 32-bit word. All other biases are loaded separately for each score, or once per tile if a head has one
//! bias.
//!
//! A warp's load reads 16 bytes from each of 8 rows, which costs 8 accesses to the L1 cache. TMA loads biases eight
//! times as fast. The kernel uses TMA if TMA supports the layout of the bias and the biases fit shared memory.
//!
//! A bias of −∞ hides the key, even if the score without the bias is NaN. The kernel tests each bias only if the
//! minimum of the block's biases is −∞.

use super::scoring::Scoring;
use super::softcap::capped;
use super::{FragmentKind, Known, RowPair, columns_end, own_column, pair_of, rows_end};
use crate::math::score::{LOWEST, ScoreArguments, plus_bias};
use cube_kit::nvidia::Half;
use cube_kit::nvidia::accumulator::{Pair, is_second};
use cube_kit::nvidia::ptx::{load_word, smaller_halves, unpack, word_address};
use cubecl::prelude::*;

/// The way in which a kernel loads the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BiasReads {
    /// The kernel loads the bias of a score at the moment when the kernel computes that score. The bias may have any
    /// precision and any strides.
    There,
    /// The biases of a block are loaded before the dot products `q·k` (S) are ready. Each 32-bit word holds the
    /// half-precision biases of two adjacent columns. If the kernel reserves shared memory for biases, TMA copies the biases
    /// there.
    Ahead(Half),
    /// The bias is one value per head, and is loaded once per tile. A bias of −∞ hides all keys from the head.
    OnceAHead,
}

/// A thread's biases for a block of up to 128 columns. Each word holds the two biases of a register pair, that is, of
/// two adjacent columns of a row. The words are in the order of the pairs.
pub(crate) type BiasWords = Vector<u32, Const<32>>;

/// Loads a thread's biases for `columns` columns, starting at `first_column`. If the kernel does not load biases before
/// the dot products `q·k` (S) are ready, the function loads nothing and returns zeros. A row or column past the end
/// gets the bias of the last row or column.
#[cube]
pub(crate) fn bias_words<F: Float, NB: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    first_column: i32,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> BiasWords {
    let bias = &scoring.bias;
    let seq_lens = &scoring.masking.seq_lens;
    let mut words = BiasWords::zeroed();
    let last_row = rows_end(seq_lens, kind.side) - 1i32;
    let row_0 = min(rows.position_0, last_row) as u32;
    let row_1 = min(rows.position_1, last_row) as u32;
    let start_0 = bias_row::<F, NB>(bias, rows.batch, rows.head_0, row_0) / 2;
    let start_1 = bias_row::<F, NB>(bias, rows.batch, rows.head_1, row_1) / 2;
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            if comptime!(kind.reads_ahead()) {
                let end = columns_end(seq_lens, kind.side);
                if first_column + comptime!(columns as i32) <= end {
                    let own = own_column(first_column, 0usize) as usize / 2;
                    // SAFETY: this expression only takes the address of `bias`. Later loads stay inside the tensor: `min`
                    // limits the rows to `last_row`, and the `if` condition limits the columns to less than `end`.
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

/// Returns true if one of the biases that this lane checks is −∞. The lanes of a warp together check `columns` columns
/// of `row`, starting at `first_column`. The row and these columns must lie inside the tensor.
#[cube]
pub(crate) fn lane_hides<F: Float, NB: Size>(
    bias: &ComptimeOption<OwnedTensor<Vector<F, NB>>>,
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
                // A lane without columns of its own checks the last columns again, so that its load stays inside the
                // row.
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

/// Turns the dot products `s` into scores: applies scale and softcap, and adds the biases. `words` holds the biases,
/// which the kernel loaded before the dot products were ready. A bias of −∞ makes the score −∞, even if the dot product
/// is NaN.
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

/// Adds the biases to the scores of the `pair`-th register pair, whose first column is `at`. If the pair's columns are
/// adjacent in memory, one load reads both biases.
#[cube]
pub(crate) fn with_bias<F: Float, NB: Size>(
    capped: Pair,
    bias: &ComptimeOption<OwnedTensor<Vector<F, NB>>>,
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
                    // If column `at` is the last column, there is no next column. The second read then reads the bias
                    // of column `at` again.
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

/// Returns the head's bias if each head has one bias for all its scores, else 0.
#[cube]
pub(crate) fn bias_of_head<F: Float, NB: Size>(
    bias: &ComptimeOption<OwnedTensor<Vector<F, NB>>>,
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

/// Returns the offset of a row's first bias, in elements. Without a bias, the result is 0.
#[cube]
pub(crate) fn bias_row<F: Float, NB: Size>(
    bias: &ComptimeOption<OwnedTensor<Vector<F, NB>>>,
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
