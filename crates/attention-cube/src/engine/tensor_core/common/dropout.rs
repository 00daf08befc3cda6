//! Dropout of the probabilities that a thread holds in accumulator registers.

use super::RowPair;
use super::scoring::Scoring;
use crate::math::dropout::kernel::{
    Drawn, DropoutArguments, cell, counter, draw_together, head_key,
};
use crate::math::side::Side;
use cube_kit::nvidia::Half;
use cube_kit::nvidia::ptx::{
    computed_here, half_products, mask_of_f16, ones_of_f16, pack, permuted_bytes,
};
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
/// halves of two words. `LATER_KEYS` makes the high bytes of the two halves from the low bytes of the first word, and
/// the low bytes from the high bytes of the second word.
const LOW_HALVES: u32 = 0x5410;
const HIGH_HALVES: u32 = 0x7632;
const LATER_KEYS: u32 = 0x2705;

/// Returns the random bits of two scores of a cell whose keys are 8 positions after those of `own`. `own` is the word of
/// their query, and `other` the second word of the cell.
#[cube]
fn bits_of_later_keys(own: u32, other: u32) -> u32 {
    permuted_bytes(own, other, LATER_KEYS.runtime())
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

/// Draws the random words of [`draw_step`] for `steps` times 16 columns, from `first_column` on. The rows are queries, and
/// share cells. The result has four words for each 16 columns, and only the first two of them have a meaning.
#[cube]
pub(crate) fn draw_steps<F: Float, NB: Size, W: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    first_column: i32,
    #[comptime] steps: usize,
) -> Vector<u32, W> {
    let mut words = Vector::<u32, W>::zeroed();
    #[comptime]
    match &scoring.dropout {
        ComptimeOption::Some(dropout) => {
            let query = rows.position_0 as u32;
            #[unroll]
            for step in 0..steps {
                let column = own_column_pair(first_column + comptime!(16 * step as i32));
                let counter = counter(query, column);
                words.insert(comptime!(4 * step), counter.0);
                words.insert(comptime!(4 * step + 1), counter.1);
            }
            let key = head_key(dropout, rows.batch, rows.head_0);
            draw_together::<W>(words, key, steps, 4usize)
        }
        ComptimeOption::None => words,
    }
}

/// Returns the four words of a step from the result of [`draw_steps`].
#[cube]
pub(crate) fn words_of_step<W: Size>(
    words: Vector<u32, W>,
    #[comptime] step: usize,
) -> Vector<u32, Const<4>> {
    let mut own = Vector::<u32, Const<4>>::zeroed();
    #[unroll]
    for i in 0..4usize {
        own.insert(i, words.extract(comptime!(4 * step + i)));
    }
    own
}

/// Converts the random words of [`draw_step`] to the random bits of the thread's eight registers for 16 columns. Each
/// word holds the bits of two registers. Registers 0 and 1 hold two adjacent columns of the first row, and registers 2
/// and 3 the same columns of the second row. Registers 4 to 7 hold the columns that lie eight columns further, in the
/// same order.
#[cube]
fn random_bits(
    words: Vector<u32, Const<4>>,
    #[comptime] shares_cells: bool,
) -> Vector<u32, Const<4>> {
    // `before` is the word of the thread's first row, and `before_other` is the second word of the same cell. `after` and
    // `after_other` are the two words for the thread's second row.
    let before = words.extract(0usize);
    let before_other = words.extract(1usize);
    let after = words.extract(comptime!(if shares_cells { 1usize } else { 2 }));
    let after_other = words.extract(comptime!(if shares_cells { 0usize } else { 3 }));
    let mut bits = Vector::<u32, Const<4>>::zeroed();
    bits.insert(0usize, before);
    bits.insert(1usize, after);
    bits.insert(2usize, bits_of_later_keys(before, before_other));
    bits.insert(3usize, bits_of_later_keys(after, after_other));
    bits
}

/// Draws the random words for `steps` times 16 columns, from `first_column` on. The rows must be keys, and the columns
/// queries. The words 0 and 1 of each step are for the thread's two columns of 8, and for their neighbors 8 columns
/// further.
///
/// The thread's scores of a step belong to two cells of two queries. The cells have a second key, whose row another lane
/// of the warp has. Each of the two lanes draws one cell, and sends the other lane the half that it needs.
#[cube]
fn draw_steps_of_keys<W: Size>(
    dropout: &DropoutArguments,
    rows: &RowPair,
    first_column: i32,
    #[comptime] steps: usize,
) -> Vector<u32, W> {
    let first = rows.position_0 as u32;
    let is_odd = first % 2u32 == 1u32;
    let mut words = Vector::<u32, W>::zeroed();
    #[unroll]
    for step in 0..steps {
        let column = own_column_pair(first_column + comptime!(16 * step as i32)) + first % 2u32;
        let counter = counter(column, first);
        words.insert(comptime!(2 * step), counter.0);
        words.insert(comptime!(2 * step + 1), counter.1);
    }
    let key = head_key(dropout, rows.batch, rows.head_0);
    let mut words = draw_together::<W>(words, key, steps, 2usize);
    let own_halves = select(is_odd, HIGH_HALVES.runtime(), LOW_HALVES.runtime());
    let other_halves = select(is_odd, LOW_HALVES.runtime(), HIGH_HALVES.runtime());
    let low = select(is_odd, 0x1054u32, LOW_HALVES.runtime());
    let high = select(is_odd, 0x3276u32, HIGH_HALVES.runtime());
    #[unroll]
    for step in 0..steps {
        let first = words.extract(comptime!(2 * step));
        let second = words.extract(comptime!(2 * step + 1));
        let received = plane_shuffle_xor(permuted_bytes(first, second, other_halves), 4u32);
        let own = permuted_bytes(first, second, own_halves);
        words.insert(comptime!(2 * step), permuted_bytes(own, received, low));
        words.insert(comptime!(2 * step + 1), permuted_bytes(own, received, high));
    }
    words
}

/// Converts the words of a step from [`draw_steps_of_keys`] to the random bits of the thread's eight registers for 16
/// columns, in the order of [`random_bits`].
#[cube]
fn random_bits_of_keys(before: u32, after: u32) -> Vector<u32, Const<4>> {
    let mut bits = Vector::<u32, Const<4>>::zeroed();
    bits.insert(0usize, before);
    bits.insert(1usize, bits_of_later_keys(before, after));
    bits.insert(2usize, after);
    bits.insert(3usize, bits_of_later_keys(after, before));
    bits
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
            let steps = comptime!(columns / 16);
            let of_keys = if comptime!(side == Side::Keys) {
                draw_steps_of_keys::<Const<16>>(dropout, rows, first_column, steps)
            } else {
                Vector::<u32, Const<16>>::zeroed()
            };
            let of_queries = if comptime!(side == Side::Queries) {
                draw_steps::<F, NB, Const<32>>(scoring, rows, first_column, steps)
            } else {
                Vector::<u32, Const<32>>::zeroed()
            };
            #[unroll]
            for step in 0..steps {
                let bits = if comptime!(side == Side::Keys) {
                    random_bits_of_keys(
                        of_keys.extract(comptime!(2 * step)),
                        of_keys.extract(comptime!(2 * step + 1)),
                    )
                } else {
                    random_bits(words_of_step::<Const<32>>(of_queries, step), true)
                };
                #[unroll]
                for i in 0..4usize {
                    let mask = mask_of_f16(bits.extract(i), dropout.thresholds, dropout.keeps_hits);
                    let bits = mask & comptime!(0x1_0001u32 << (4 * (step % 4) + i));
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
/// the random words of [`draw_step`]. If the kernel has dropout, dropped probabilities are 0, and kept probabilities
/// have a factor that [`output_factor`] undoes.
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
        ComptimeOption::Some(dropout) => {
            let bits = random_bits(words, shares_cells);
            #[unroll]
            for i in 0..4usize {
                let keep = ones_of_f16(bits.extract(i), dropout.thresholds, dropout.keeps_hits);
                packed.insert(i, half_products(packed.extract(i), keep, half));
            }
            packed
        }
        ComptimeOption::None => packed,
    }
}

/// Returns the factor by which the forward multiplies the output. Without dropout, it is 1. With dropout, it is 1 /
/// (1 − drop probability), times the inverse of the factor of [`packed_step`].
///
/// The random bits are compared as f16 numbers, and the comparison gives the f16 number 1. Read as bf16, its bits are
/// the number 2⁻⁷.
#[cube]
pub(crate) fn output_factor(
    dropout: &ComptimeOption<DropoutArguments>,
    #[comptime] half: Half,
) -> f32 {
    #[comptime]
    match dropout {
        ComptimeOption::Some(dropout) => {
            dropout.kept * f32::new(comptime!(if half == Half::Bf16 { 128.0 } else { 1.0 }))
        }
        ComptimeOption::None => f32::new(1.0),
    }
}
