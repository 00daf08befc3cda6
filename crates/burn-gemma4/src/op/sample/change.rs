//! Kernels that apply the repetition penalty to logits, suppress tokens, and update the bit sets. Each row has a bit
//! set of the tokens that its text contains.
//!
//! Budget: one logit per unit in registers, no shared memory. Bound: memory bandwidth. Each logit is read and written
//! once.

use cubecl::prelude::*;

/// The number of units in a cube.
pub(super) const UNITS: usize = 256;

/// True if the bit of `token` is set. `word` is the 32-bit word of the bit set that holds this bit.
#[cube]
fn is_set(word: i32, token: u32) -> bool {
    (u32::reinterpret(word) >> (token % 32u32)) & 1u32 == 1u32
}

/// Applies the repetition penalty to the logits of tokens that the text contains. Multiplies negative logits by the
/// penalty, and divides all other logits by the penalty. The logits of suppressed tokens become −∞.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn change_logits<E: Float>(
    logits: &Tensor<E>,
    seen: ComptimeOption<&Tensor<i32>>,
    suppressed: ComptimeOption<&Tensor<i32>>,
    changed: &mut Tensor<f32>,
    penalty: f32,
    columns: u32,
    rows: u32,
    #[define(E)] _element: ElemType,
) {
    if ABSOLUTE_POS >= columns as usize * rows as usize {
        terminate!();
    }
    let row = (ABSOLUTE_POS / columns as usize) as u32;
    let token = (ABSOLUTE_POS % columns as usize) as u32;
    let words = columns.div_ceil(32u32);
    let mut logit = f32::cast_from(logits[ABSOLUTE_POS]);
    #[comptime]
    match &seen {
        ComptimeOption::Some(seen) => {
            let at = (row * words + token / 32u32) as usize;
            if is_set(seen[at], token) {
                logit = select(logit < 0.0f32, logit * penalty, logit / penalty);
            }
        }
        ComptimeOption::None => {}
    }
    #[comptime]
    match &suppressed {
        ComptimeOption::Some(suppressed) => {
            if is_set(suppressed[(token / 32u32) as usize], token) {
                logit = f32::reinterpret(0xFF80_0000u32.runtime());
            }
        }
        ComptimeOption::None => {}
    }
    changed[ABSOLUTE_POS] = logit;
}

/// For each row, adds one token to the row's bit set.
#[cube(launch_unchecked)]
pub(super) fn mark(seen: &mut Tensor<i32>, tokens: &Tensor<i32>, words: u32, rows: u32) {
    if ABSOLUTE_POS < rows as usize {
        let token = u32::reinterpret(tokens[ABSOLUTE_POS]);
        let at = ABSOLUTE_POS * words as usize + (token / 32u32) as usize;
        let bit = 1u32 << (token % 32u32);
        seen[at] = i32::reinterpret(u32::reinterpret(seen[at]) | bit);
    }
}
