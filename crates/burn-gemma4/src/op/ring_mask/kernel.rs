//! The attention mask over the slots of a ring buffer of keys. Each slot holds the key that was last written to the
//! slot. The variable `column` is the position of the token to which this key belongs.
//!
//! Budget: one element of the mask per unit in registers, no shared memory. Bound: latency.

use cube_kit::pdl::{launch_dependents_and_wait, mark_volatile};
use cubecl::prelude::*;

/// The number of units in a cube.
pub(super) const UNITS: usize = 256;

/// Writes `[sequences, queries, slots]`, with 1 where a query sees the key in a slot. If `last_is_written`, the newest
/// key in the ring buffer belongs to the last query's token. Otherwise the newest key belongs to the preceding token.
#[cube(launch_unchecked)]
pub(super) fn ring_mask_pdl<M: Numeric, I: Int>(
    positions: &Tensor<I>,
    mask: &mut Tensor<M>,
    queries: u32,
    slots: u32,
    window: u32,
    all: u32,
    #[comptime] last_is_written: bool,
    #[comptime] pdl: bool,
    #[define(M)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    launch_dependents_and_wait(pdl);
    mark_volatile(positions, pdl);
    let at = ABSOLUTE_POS as u32;
    if at < all {
        let slot = i32::cast_from(at % slots);
        let query = at / slots;
        let of_last = query / queries * queries + queries - 1u32;
        let position = i32::cast_from(positions[query as usize]);
        let mut last = i32::cast_from(positions[of_last as usize]);
        if comptime!(!last_is_written) {
            last -= 1i32;
        }
        let slots = i32::cast_from(slots);
        // The number of positions by which the key in this slot is older than the newest key.
        let behind = (last + slots - slot) % slots;
        let column = last - behind;
        let before = position - column;
        let is_seen = column >= 0i32 && before >= 0i32 && before < i32::cast_from(window);
        mask[at as usize] = M::cast_from(select(is_seen, 1u32, 0u32));
    }
}
