//! Draws the random bits of dropout for the scores that a thread holds in accumulator registers.

use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::math::dropout::kernel::{
    Drawn, DropoutArguments, cell, counter, draw_together, head_key,
};
use cube_kit::nvidia::ptx::permuted_bytes;
use cubecl::prelude::*;

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
pub(super) fn random_bits(
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
pub(super) fn draw_steps_of_keys<W: Size>(
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
pub(super) fn random_bits_of_keys(before: u32, after: u32) -> Vector<u32, Const<4>> {
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
