//! Dropout of the probabilities that a thread holds in accumulator registers.

use super::RowPair;
use super::scoring::Scoring;
use crate::math::dropout::kernel::{Drawn, DropoutArguments, cell, head_key, random_bits_of_pair};
use crate::math::side::Side;
use cube_kit::nvidia::Half;
use cube_kit::nvidia::accumulator::Pair;
use cube_kit::nvidia::ptx::{above_as_f16, pack, permuted_bytes};
use cubecl::prelude::*;

/// The keep bits of a thread's registers in a fragment of at most 128 columns. A bit is 1 if dropout keeps the register's
/// probability. Register `2 p` has bit `p % 16`, and register `2 p + 1` has bit `p % 16 + 16`. Both bits lie in `low`
/// if `p < 16`, else in `high`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct KeepBits {
    pub low: u32,
    pub high: u32,
    /// The factor by which kept probabilities are multiplied.
    pub kept: f32,
}

/// Three selectors for [`permuted_bytes`]. The first joins the low halves of two words, and the second joins their high
/// halves. The third exchanges the two bytes within each half of the first word.
const LOW_HALVES: u32 = 0x5410;
const HIGH_HALVES: u32 = 0x7632;
const EXCHANGED: u32 = 0x2301;

/// Returns the keep mask of two scores: all bits of a half are 1 if dropout keeps the score's probability, else 0. See
/// [`random_bits_of_pair`] for the arguments.
#[cube]
fn keep_mask(own: u32, other: u32, dropout: &DropoutArguments) -> u32 {
    above_as_f16(random_bits_of_pair(own, other), dropout.thresholds) ^ dropout.drops_hits
}

#[cube]
fn exchanged(word: u32) -> u32 {
    permuted_bytes(word, word, EXCHANGED.runtime())
}

/// Returns the keep masks of the thread's eight registers for 16 columns, one word for two registers. `column` is the first of
/// these columns. Registers 0 and 1 hold two adjacent columns of the first row, and registers 2 and 3 the same columns of the
/// second row. Registers 4 to 7 hold the elements eight columns later, in the same order.
///
/// The random generator draws 64 bits at once for a cell of eight scores (see `math/dropout.rs`). If the rows are keys, the
/// eight registers are halves of two cells. If the rows are queries, `shares_cells` tells whether the positions of the
/// thread's two rows differ by 8, as in a tile of one head. If they do, the eight registers are one cell, and one draw
/// serves all of them. Otherwise, each row needs its own draw.
#[cube]
fn keep_masks_of_step(
    dropout: &DropoutArguments,
    rows: &RowPair,
    column: i32,
    #[comptime] shares_cells: bool,
    #[comptime] side: Side,
) -> Vector<u32, Const<4>> {
    let column = column as u32 + UNIT_POS % 4u32 * 2u32;
    let first = rows.position_0 as u32;
    let key_0 = head_key(dropout, rows.batch, rows.head_0);
    let drawn = if comptime!(side == Side::Keys) {
        cell(key_0, column, first)
    } else {
        cell(key_0, first, column)
    };
    let mut masks = Vector::<u32, Const<4>>::zeroed();
    if comptime!(side == Side::Keys) {
        let next = cell(key_0, column + 1u32, first);
        let halves = select(
            first % 2u32 == 1u32,
            HIGH_HALVES.runtime(),
            LOW_HALVES.runtime(),
        );
        let before = permuted_bytes(drawn.first, next.first, halves);
        let after = permuted_bytes(drawn.second, next.second, halves);
        masks.insert(0usize, keep_mask(before, after, dropout));
        masks.insert(1usize, keep_mask(exchanged(before), after, dropout));
        masks.insert(2usize, keep_mask(after, before, dropout));
        masks.insert(3usize, keep_mask(exchanged(after), before, dropout));
    } else if comptime!(shares_cells) {
        let (before, after) = (drawn.first, drawn.second);
        masks.insert(0usize, keep_mask(before, after, dropout));
        masks.insert(1usize, keep_mask(after, before, dropout));
        masks.insert(2usize, keep_mask(exchanged(before), after, dropout));
        masks.insert(3usize, keep_mask(exchanged(after), before, dropout));
    } else {
        let second = rows.position_1 as u32;
        let key_1 = head_key(dropout, rows.batch, rows.head_1);
        let (own, other) = own_and_other(drawn, first);
        masks.insert(0usize, keep_mask(own, other, dropout));
        masks.insert(2usize, keep_mask(exchanged(own), other, dropout));
        let (own, other) = own_and_other(cell(key_1, second, column), second);
        masks.insert(1usize, keep_mask(own, other, dropout));
        masks.insert(3usize, keep_mask(exchanged(own), other, dropout));
    }
    masks
}

/// A cell has two words of random bits, one for each of its two queries. Returns first the word that belongs to `query`,
/// then the cell's remaining word.
#[cube]
fn own_and_other(drawn: Drawn, query: u32) -> (u32, u32) {
    let is_second = query / 8u32 % 2u32 == 1u32;
    (
        select(is_second, drawn.second, drawn.first),
        select(is_second, drawn.first, drawn.second),
    )
}

/// Returns the keep bits of a fragment. Its `columns` columns begin at `first_column`. Without dropout, the bits are not used.
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
                let masks = keep_masks_of_step(dropout, rows, column, true, side);
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
                kept: dropout.kept,
            }
        }
        ComptimeOption::None => KeepBits {
            low: u32::new(0),
            high: u32::new(0),
            kept: f32::new(1.0),
        },
    }
}

/// True if a register's probability is kept.
#[cube]
fn is_kept(keep: &KeepBits, #[comptime] register: usize) -> bool {
    let word = if comptime!(register < 32) {
        keep.low
    } else {
        keep.high
    };
    word & comptime!(1u32 << (register / 2 % 16 + 16 * (register % 2))) != 0u32
}

/// Returns the factor by which dropout multiplies a register's probability. The factor is 0 if the probability is dropped, else
/// `keep.kept`.
#[cube]
pub(crate) fn keep_factor_of(keep: &KeepBits, #[comptime] register: usize) -> f32 {
    select(is_kept(keep, register), keep.kept, 0.0f32)
}

/// Returns the factor by which the accumulated gradient of V is multiplied: `1 / p_scale`, because P was multiplied by
/// `p_scale`. If the kernel has dropout, the result is also multiplied by `kept`, the factor of the probabilities that
/// dropout keeps.
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

/// Sets dropped probabilities of the `pair`-th register pair to 0, if the kernel has dropout. Kept probabilities stay
/// unchanged, because their product with `kept_scale` could exceed the largest half-precision number. Instead, the kernel
/// multiplies the result of the GEMM by `kept_scale`.
#[cube]
pub(crate) fn dropped_pair(
    values: Pair,
    keep: &KeepBits,
    #[comptime] pair: usize,
    #[comptime] has_dropout: bool,
) -> Pair {
    if comptime!(has_dropout) {
        Pair {
            first: select(is_kept(keep, comptime!(2 * pair)), values.first, 0.0f32),
            second: select(
                is_kept(keep, comptime!(2 * pair + 1)),
                values.second,
                0.0f32,
            ),
        }
    } else {
        values
    }
}

/// Packs the thread's eight probabilities of 16 columns as the left operand of the GEMM `P V`. `column` is the first of these
/// columns. If the kernel has dropout, dropped probabilities are 0. The output is later multiplied by `kept_scale`.
#[cube]
pub(crate) fn packed_step<F: Float, NB: Size>(
    values: Vector<f32, Const<8>>,
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    column: i32,
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
            packed & keep_masks_of_step(dropout, rows, column, shares_cells, Side::Queries)
        }
        ComptimeOption::None => packed,
    }
}
