//! Dropout of the probabilities that a thread holds in accumulator registers.

mod draws;

pub(crate) use self::draws::{draw_step, draw_steps, words_of_step};

use self::draws::{draw_steps_of_keys, random_bits, random_bits_of_keys};
use super::RowPair;
use super::scoring::Scoring;
use crate::math::dropout::kernel::DropoutArguments;
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
