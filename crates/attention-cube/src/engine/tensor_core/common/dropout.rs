//! Dropout of the probabilities that a thread holds in accumulator registers.

use super::RowPair;
use super::scoring::Scoring;
use crate::math::dropout::kernel::{DropoutArguments, cell, head_key};
use crate::math::side::Side;
use cube_kit::nvidia::accumulator::Pair;
use cubecl::prelude::*;

/// The number of registers of a thread that hold 16 columns of a fragment, in both of the thread's rows.
const STEP_REGISTERS: usize = 8;

/// The keep bits of a thread's registers in a fragment of at most 128 columns. The bit of a register is set if dropout keeps
/// the register's probability.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct KeepBits {
    pub low: u32,
    pub high: u32,
    /// The factor by which kept probabilities are multiplied.
    pub kept: f32,
}

/// Compares the two 16-bit halves of a random word with the dropout threshold. Bit 0 of the result is 1 if the low half keeps
/// its score, and bit 1 is 1 if the high half keeps its score.
#[cube]
fn kept_halves(word: u32, dropout: &DropoutArguments) -> u32 {
    let low = word & 0xffffu32;
    let high = word >> 16u32;
    select(low < dropout.threshold, 0u32, 1u32) | select(high < dropout.threshold, 0u32, 2u32)
}

/// Returns the keep bits of the thread's eight registers for 16 columns. `column` is the first of these columns. Registers 0
/// and 1 hold two adjacent columns of the first row, and registers 2 and 3 the same columns of the second row. Registers 4 to 7
/// hold the elements eight columns later, in the same order.
///
/// The random generator draws 64 bits at once for a cell of four scores: two queries that differ by 8, and two keys that differ
/// by 8. `shares_cells` is true if the positions of the thread's two rows differ by 8, as in a tile of one head. The two rows
/// then share their cells, so one draw serves both rows.
#[cube]
fn keep_bits_of_step(
    dropout: &DropoutArguments,
    rows: &RowPair,
    column: i32,
    #[comptime] shares_cells: bool,
    #[comptime] side: Side,
) -> u32 {
    let own = column as u32 + UNIT_POS % 4u32 * 2u32;
    let first = rows.position_0 as u32;
    let key_0 = head_key(dropout, rows.batch, rows.head_0);
    let mut bits = 0u32;
    #[unroll]
    for e in 0..2usize {
        let column = own + comptime!(e as u32);
        if comptime!(side == Side::Keys) {
            // The rows are keys: the two drawn words belong to the two rows, and the two halves of a word to two columns.
            let drawn = cell(key_0, column, first);
            let of_row_0 = kept_halves(drawn.first, dropout);
            let of_row_1 = kept_halves(drawn.second, dropout);
            bits |= (of_row_0 & 1u32
                | (of_row_1 & 1u32) << 2u32
                | (of_row_0 & 2u32) << 3u32
                | (of_row_1 & 2u32) << 5u32)
                << comptime!(e as u32);
        } else if comptime!(shares_cells) {
            let drawn = cell(key_0, first, column);
            let before = kept_halves(drawn.first, dropout);
            let after = kept_halves(drawn.second, dropout);
            bits |= (before & 1u32
                | (before & 2u32) << 1u32
                | (after & 1u32) << 4u32
                | (after & 2u32) << 5u32)
                << comptime!(e as u32);
        } else {
            let key_1 = head_key(dropout, rows.batch, rows.head_1);
            let second = rows.position_1 as u32;
            let of_row_0 = cell(key_0, first, column);
            let of_row_1 = cell(key_1, second, column);
            let shift_0 = first / 8u32 % 2u32;
            let shift_1 = second / 8u32 % 2u32;
            let before_0 = kept_halves(of_row_0.first, dropout) >> shift_0 & 1u32;
            let before_1 = kept_halves(of_row_1.first, dropout) >> shift_1 & 1u32;
            let after_0 = kept_halves(of_row_0.second, dropout) >> shift_0 & 1u32;
            let after_1 = kept_halves(of_row_1.second, dropout) >> shift_1 & 1u32;
            bits |= (before_0 | before_1 << 2u32 | after_0 << 4u32 | after_1 << 6u32)
                << comptime!(e as u32);
        }
    }
    bits
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
                let bits = keep_bits_of_step(dropout, rows, column, true, side);
                if comptime!(step < 4) {
                    low |= bits << comptime!((STEP_REGISTERS * step) as u32);
                } else {
                    high |= bits << comptime!((STEP_REGISTERS * (step - 4)) as u32);
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
    word & comptime!(1u32 << (register % 32)) != 0u32
}

/// Returns the factor by which dropout multiplies a register's probability. The factor is 0 if the probability is dropped, else
/// `keep.kept`.
#[cube]
pub(crate) fn keep_factor_of(keep: &KeepBits, #[comptime] register: usize) -> f32 {
    select(is_kept(keep, register), keep.kept, 0.0f32)
}

/// Returns the factor by which the accumulated gradient of V is multiplied: `1 / p_scale`, because P was multiplied by
/// `p_scale`. If the kernel has dropout, the factor also includes the factor of kept probabilities.
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
/// unchanged, because their product with `kept_scale` could exceed half precision. The result of the GEMM is multiplied by
/// `kept_scale` instead.
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

/// Sets dropped probabilities among the thread's eight probabilities of 16 columns to 0, if the kernel has dropout. `column` is
/// the first of these columns. The output is later multiplied by `kept_scale`.
#[cube]
pub(crate) fn dropped_step<F: Float, NB: Size>(
    values: Vector<f32, Const<8>>,
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    column: i32,
    #[comptime] shares_cells: bool,
) -> Vector<f32, Const<8>> {
    #[comptime]
    match &scoring.dropout {
        ComptimeOption::Some(dropout) => {
            let bits = keep_bits_of_step(dropout, rows, column, shares_cells, Side::Queries);
            let mut values = values;
            #[unroll]
            for register in 0..8usize {
                let bit = bits & comptime!(1u32 << register);
                let value = select(bit == 0u32, 0.0f32, values.extract(register));
                values.insert(register, value);
            }
            values
        }
        ComptimeOption::None => values,
    }
}
