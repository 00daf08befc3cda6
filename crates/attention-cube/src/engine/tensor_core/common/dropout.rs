//! Dropout of the probabilities that a thread holds in accumulator registers.

use super::RowPair;
use super::scoring::Scoring;
use crate::math::dropout::kernel::{Drawn, DropoutArguments, cell, head_key, random_bits_of_pair};
use crate::math::side::Side;
use cube_kit::nvidia::Half;
use cube_kit::nvidia::ptx::{above_as_f16, computed_here, pack, permuted_bytes};
use cubecl::prelude::*;

/// The keep bits of a thread's registers in a fragment of at most 128 columns. A bit is 1 if dropout keeps the
/// probability that the register holds. Register `2 p` has bit `p % 16`, and register `2 p + 1` has bit `p % 16 + 16`.
/// Both bits lie in `low` if `p < 16`, else in `high`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct KeepBits {
    pub low: u32,
    pub high: u32,
    /// The factor of delta in [`gradient_minus_delta`]: `-1 / kept`, where `kept` is dropout's scale 1 / (1 − drop
    /// probability).
    pub minus_inverse_kept: f32,
}

/// Selectors for [`permuted_bytes`]. `LOW_HALVES` joins the low halves of two words, and `HIGH_HALVES` joins the high
/// halves of two words. `EXCHANGED` exchanges the two bytes in each half of the first word.
const LOW_HALVES: u32 = 0x5410;
const HIGH_HALVES: u32 = 0x7632;
const EXCHANGED: u32 = 0x2301;

/// Returns the keep masks of two scores in one word, with 16 bits per score. All 16 bits are 1 if dropout keeps the
/// score's probability. See [`random_bits_of_pair`] for the arguments.
#[cube]
fn keep_mask(own: u32, other: u32, dropout: &DropoutArguments) -> u32 {
    above_as_f16(random_bits_of_pair(own, other), dropout.thresholds) ^ dropout.drops_hits
}

#[cube]
fn exchanged(word: u32) -> u32 {
    permuted_bytes(word, word, EXCHANGED.runtime())
}

/// Draws the random words for the eight scores that the thread holds in 16 columns. `column` is the first of these
/// columns, and the rows are queries.
///
/// The random generator draws 64 bits at once for a cell of eight scores (see `math/dropout.rs`). A cell has one word
/// for each of two queries that are 8 positions apart. `shares_cells` is true if the thread's two rows are 8 positions
/// apart, as in a tile of one head. The eight scores are then one cell, and words 0 and 1 are the words of the two
/// rows. Otherwise, each row needs its own draw. Words 0 and 2 are then the words of the two rows. Words 1 and 3 are
/// the unused second words of the two drawn cells.
#[cube]
pub(crate) fn draw_step<F: Float, NB: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    column: i32,
    #[comptime] shares_cells: bool,
) -> Vector<u32, Const<4>> {
    let mut words = Vector::<u32, Const<4>>::zeroed();
    #[comptime]
    match &scoring.dropout {
        ComptimeOption::Some(dropout) => {
            let column = own_column_pair(column);
            let first = rows.position_0 as u32;
            let drawn = cell(head_key(dropout, rows.batch, rows.head_0), first, column);
            if comptime!(shares_cells) {
                words.insert(0usize, drawn.first);
                words.insert(1usize, drawn.second);
            } else {
                let (own, other) = own_and_other(drawn, first);
                words.insert(0usize, own);
                words.insert(1usize, other);
                let second = rows.position_1 as u32;
                let drawn = cell(head_key(dropout, rows.batch, rows.head_1), second, column);
                let (own, other) = own_and_other(drawn, second);
                words.insert(2usize, own);
                words.insert(3usize, other);
            }
            words
        }
        ComptimeOption::None => words,
    }
}

/// Converts the random words of [`draw_step`] to the keep masks of the thread's eight registers for 16 columns. Each
/// mask word covers two registers. Registers 0 and 1 hold two adjacent columns of the first row, and registers 2 and 3
/// the same columns of the second row. Registers 4 to 7 hold the columns that lie eight columns further, in the same
/// order.
#[cube]
fn keep_masks(
    words: Vector<u32, Const<4>>,
    dropout: &DropoutArguments,
    #[comptime] shares_cells: bool,
) -> Vector<u32, Const<4>> {
    // `before` is the word of the thread's first row, and `before_other` is the second word of the same cell. `after` and
    // `after_other` are the two words for the thread's second row.
    let before = words.extract(0usize);
    let before_other = words.extract(1usize);
    let after = words.extract(comptime!(if shares_cells { 1usize } else { 2 }));
    let after_other = words.extract(comptime!(if shares_cells { 0usize } else { 3 }));
    let mut masks = Vector::<u32, Const<4>>::zeroed();
    masks.insert(0usize, keep_mask(before, before_other, dropout));
    masks.insert(1usize, keep_mask(after, after_other, dropout));
    masks.insert(2usize, keep_mask(exchanged(before), before_other, dropout));
    masks.insert(3usize, keep_mask(exchanged(after), after_other, dropout));
    masks
}

/// Returns the keep masks of the thread's eight registers for 16 columns, in the order of [`keep_masks`]. The rows must
/// be keys, and the columns queries. The registers hold scores of two *cells*. A cell is eight scores that share one
/// draw of random bits.
#[cube]
fn keep_masks_of_keys(
    dropout: &DropoutArguments,
    rows: &RowPair,
    column: i32,
) -> Vector<u32, Const<4>> {
    let column = own_column_pair(column);
    let first = rows.position_0 as u32;
    let key = head_key(dropout, rows.batch, rows.head_0);
    let drawn = cell(key, column, first);
    let next = cell(key, column + 1u32, first);
    let halves = select(
        first % 2u32 == 1u32,
        HIGH_HALVES.runtime(),
        LOW_HALVES.runtime(),
    );
    let before = permuted_bytes(drawn.first, next.first, halves);
    let after = permuted_bytes(drawn.second, next.second, halves);
    let mut masks = Vector::<u32, Const<4>>::zeroed();
    masks.insert(0usize, keep_mask(before, after, dropout));
    masks.insert(1usize, keep_mask(exchanged(before), after, dropout));
    masks.insert(2usize, keep_mask(after, before, dropout));
    masks.insert(3usize, keep_mask(exchanged(after), before, dropout));
    masks
}

/// The eight columns that start at `column` are four pairs of adjacent columns, one pair per thread of a quad. Returns
/// the first column of the thread's pair.
#[cube]
fn own_column_pair(column: i32) -> u32 {
    column as u32 + UNIT_POS % 4u32 * 2u32
}

/// Returns the two random words of a cell: first the word of `query`, then the word of the cell's second query.
#[cube]
fn own_and_other(drawn: Drawn, query: u32) -> (u32, u32) {
    let is_second = query / 8u32 % 2u32 == 1u32;
    (
        select(is_second, drawn.second, drawn.first),
        select(is_second, drawn.first, drawn.second),
    )
}

/// Returns the keep bits of a fragment. The fragment has `columns` columns, and starts at column `first_column`.
/// Without dropout, nothing reads the returned bits.
#[cube]
pub(crate) fn keep_bits<F: Float, NB: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    first_column: i32,
    #[comptime] columns: usize,
    #[comptime] side: Side,
) -> KeepBits {
    #[comptime]
    match &scoring.dropout {
        ComptimeOption::Some(dropout) => {
            comptime!(assert!(
                columns <= 128,
                "two words hold the bits of 128 columns"
            ));
            let mut low = 0u32;
            let mut high = 0u32;
            #[unroll]
            for step in 0..comptime!(columns / 16) {
                let column = first_column + comptime!(16 * step as i32);
                let masks = if comptime!(side == Side::Keys) {
                    keep_masks_of_keys(dropout, rows, column)
                } else {
                    let words = draw_step::<F, NB>(scoring, rows, column, true);
                    keep_masks(words, dropout, true)
                };
                #[unroll]
                for i in 0..4usize {
                    let bits = masks.extract(i) & comptime!(0x1_0001u32 << (4 * (step % 4) + i));
                    if comptime!(step < 4) {
                        low |= bits;
                    } else {
                        high |= bits;
                    }
                }
            }
            KeepBits {
                low,
                high,
                minus_inverse_kept: dropout.minus_inverse_kept,
            }
        }
        ComptimeOption::None => KeepBits {
            low: u32::new(0),
            high: u32::new(0),
            minus_inverse_kept: f32::new(-1.0),
        },
    }
}

/// Returns the result of [`keep_bits`]. This function also keeps the compiler from moving the computation of the bits
/// past the next wait.
#[cube]
pub(crate) fn keep_bits_ahead<F: Float, NB: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    first_column: i32,
    #[comptime] columns: usize,
    #[comptime] side: Side,
) -> KeepBits {
    let keep = keep_bits::<F, NB>(scoring, rows, first_column, columns, side);
    if comptime!(scoring.dropout.is_some()) {
        KeepBits {
            low: computed_here(keep.low),
            high: computed_here(keep.high),
            minus_inverse_kept: keep.minus_inverse_kept,
        }
    } else {
        keep
    }
}

/// Returns the word of the keep bits that holds the bits of the `pair`-th register pair.
#[cube]
fn word_of_pair(keep: &KeepBits, #[comptime] pair: usize) -> u32 {
    if comptime!(pair < 16) {
        keep.low
    } else {
        keep.high
    }
}

/// True if dropout keeps the probability in register `register`.
#[cube]
fn is_kept(keep: &KeepBits, #[comptime] register: usize) -> bool {
    let word = word_of_pair(keep, comptime!(register / 2));
    word & comptime!(1u32 << (register / 2 % 16 + 16 * (register % 2))) != 0u32
}

/// Returns `dp − delta` of a register. dS is the product of this difference and the weight (the probability times the
/// slope of the softcap).
///
/// With dropout, returns `(keep · dp · kept − delta) / kept`, where `keep` is 0 for a dropped probability, else 1, and `kept`
/// is 1 / (1 − drop probability). The division by `kept` saves a multiplication per score, because the kernel multiplies only
/// the sums over dS by `kept` (see [`times_kept`]).
#[cube]
pub(crate) fn gradient_minus_delta(
    dp: f32,
    delta: f32,
    keep: &KeepBits,
    #[comptime] register: usize,
    #[comptime] has_dropout: bool,
) -> f32 {
    if comptime!(has_dropout) {
        let kept_dp = select(is_kept(keep, register), dp, 0.0f32);
        fma(delta, keep.minus_inverse_kept, kept_dp)
    } else {
        dp - delta
    }
}

/// Multiplies `value` by `kept`, dropout's scale 1 / (1 − drop probability), if the kernel has dropout. A value that was
/// computed with [`gradient_minus_delta`] lacks this factor.
#[cube]
pub(crate) fn times_kept(value: f32, dropout: &ComptimeOption<DropoutArguments>) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(dropout) => value * dropout.kept,
        ComptimeOption::None => value,
    }
}

/// Returns the factor that corrects the accumulated gradient of V. Without dropout, the factor is `1 / p_scale`,
/// because P was multiplied by `p_scale`. With dropout, the factor is `kept / p_scale`, where `kept` is 1 / (1 − drop
/// probability).
#[cube]
pub(crate) fn value_factor(
    dropout: &ComptimeOption<DropoutArguments>,
    #[comptime] p_scale: f32,
) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(dropout) => dropout.kept * f32::new(comptime!(1.0 / p_scale)),
        ComptimeOption::None => f32::new(comptime!(1.0 / p_scale)),
    }
}

/// A selector for [`permuted_bytes`]. It fills the two halves of the result with the sign bits of the second and of the
/// fourth byte.
const SIGNS_OF_HALVES: u32 = 0xBB99;

/// Sets dropped probabilities of the `pair`-th register pair to 0. `packed` holds the two probabilities in half
/// precision. Kept probabilities stay unchanged, because the product of a probability and `kept_scale` could exceed the
/// range of half precision. The kernel multiplies the result of the GEMM by `kept_scale` instead.
#[cube]
pub(crate) fn dropped_pair(
    packed: u32,
    keep: &KeepBits,
    #[comptime] pair: usize,
    #[comptime] has_dropout: bool,
) -> u32 {
    if comptime!(has_dropout) {
        // The shift moves the two keep bits to the highest bits of the two halves.
        let signs = word_of_pair(keep, pair) << comptime!(15 - (pair % 16) as u32);
        packed & permuted_bytes(signs, signs, SIGNS_OF_HALVES.runtime())
    } else {
        packed
    }
}

/// Packs the eight probabilities that the thread holds in 16 columns as the left operand of the GEMM `P V`. `words` are
/// the random words of [`draw_step`]. If the kernel has dropout, dropped probabilities are 0. The kernel later
/// multiplies the output by `kept_scale`.
#[cube]
pub(crate) fn packed_step<F: Float, NB: Size>(
    values: Vector<f32, Const<8>>,
    words: Vector<u32, Const<4>>,
    scoring: &Scoring<F, NB>,
    #[comptime] shares_cells: bool,
    #[comptime] half: Half,
) -> Vector<u32, Const<4>> {
    let mut packed = Vector::<u32, Const<4>>::zeroed();
    #[unroll]
    for i in 0..4usize {
        let first = values.extract(comptime!(2 * i));
        let second = values.extract(comptime!(2 * i + 1));
        packed.insert(i, pack(first, second, half));
    }
    #[comptime]
    match &scoring.dropout {
        ComptimeOption::Some(dropout) => packed & keep_masks(words, dropout, shares_cells),
        ComptimeOption::None => packed,
    }
}
