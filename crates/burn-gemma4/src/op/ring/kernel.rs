//! What queries see of a ring's slots.
//!
//! Budget: registers alone, a number of the mask a unit. Bound by latency; of reads that wait for each other there are none.

use cube_kit::overlap::{take_turn, was_written};
use cubecl::prelude::*;

/// Units of a cube.
pub(super) const UNITS: usize = 256;

/// `[sequences, queries, slots]`: whether a query sees a slot's newest column. The last query's own is the last that is written where `last_is_written`, else the one
/// before it.
#[cube(launch_unchecked)]
pub(super) fn ring_mask_overlapped<M: Numeric, I: Int>(
    positions: &Tensor<I>,
    mask: &mut Tensor<M>,
    queries: u32,
    slots: u32,
    window: u32,
    all: u32,
    #[comptime] last_is_written: bool,
    #[comptime] overlaps: bool,
    #[define(M)] _element: ElemType,
    #[define(I)] _integer: ElemType,
) {
    take_turn(overlaps);
    was_written(positions, overlaps);
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
        // The last column's slot holds the newest column, the one before it the second newest.
        let behind = (last + slots - slot) % slots;
        let column = last - behind;
        let before = position - column;
        let is_seen = column >= 0i32 && before >= 0i32 && before < i32::cast_from(window);
        mask[at as usize] = M::cast_from(select(is_seen, 1u32, 0u32));
    }
}
