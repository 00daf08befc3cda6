//! Groups the (row, chosen expert) pairs by expert, with a stable counting sort.
//!
//! Budget: eight bytes of shared memory per unit. Schedule: one cube per expert. Each unit handles a contiguous range
//! of pairs. Bound: latency. Every cube reads the chosen experts of all pairs twice from the cache.

use cubecl::prelude::*;

/// The number of units of a cube.
pub(super) const UNITS: usize = 256;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn group_places(
    chosen: &Tensor<i32>,
    order: &mut Tensor<i32>,
    starts: &mut Tensor<i32>,
    places: u32,
    experts: u32,
) {
    let expert = CUBE_POS as u32;
    let length = places.div_ceil(comptime!(UNITS as u32));
    let first = min(UNIT_POS * length, places);
    let end = min(first + length, places);
    let mut own = 0u32;
    let mut before = 0u32;
    let mut place = first;
    while place < end {
        let number = u32::cast_from(chosen[place as usize]);
        own += select(number == expert, 1u32, 0u32);
        before += select(number < expert, 1u32, 0u32);
        place += 1u32;
    }
    let mut of_units = Shared::<[u32]>::new_slice(UNITS);
    let mut before_units = Shared::<[u32]>::new_slice(UNITS);
    of_units[UNIT_POS as usize] = own;
    before_units[UNIT_POS as usize] = before;
    sync_cube();
    let mut start = 0u32;
    let mut earlier = 0u32;
    for unit in 0..comptime!(UNITS as u32) {
        start += before_units[unit as usize];
        earlier += select(unit < UNIT_POS, of_units[unit as usize], 0u32);
    }
    let mut at = start + earlier;
    let mut place = first;
    while place < end {
        if u32::cast_from(chosen[place as usize]) == expert {
            order[at as usize] = i32::cast_from(place);
            at += 1u32;
        }
        place += 1u32;
    }
    if UNIT_POS == 0 {
        starts[expert as usize] = i32::cast_from(start);
        if expert == experts - 1u32 {
            starts[experts as usize] = i32::cast_from(places);
        }
    }
}
