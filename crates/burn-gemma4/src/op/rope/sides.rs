//! The sides of a launch of heads: queries alone, keys alone or values alone, or a layer's queries, keys and values, each of whose heads has
//! a cube.

use cubecl::prelude::*;

/// What a side's heads are made of, and where they go: the strides of `[sequences, heads, slots, columns]`, whose columns lie together.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Side {
    /// The first column of the projection that is theirs.
    pub start: u32,
    pub heads: u32,
    pub slots: u32,
    /// Rows of the projection that are of one of the target's sequences.
    pub rows_each: u32,
    pub to_sequence: u32,
    pub to_head: u32,
    pub to_slot: u32,
}

/// The first side, or of a layer the queries'.
pub(super) const FIRST: u32 = 0;
/// A layer's keys.
pub(super) const KEYS: u32 = 1;
/// A layer's values.
pub(super) const VALUES: u32 = 2;

/// A head, and its side.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    pub number: u32,
    /// Among the side's heads.
    pub head: u32,
    pub start: u32,
    pub slots: u32,
    pub rows_each: u32,
    pub to_sequence: u32,
    pub to_head: u32,
    pub to_slot: u32,
}

/// The place of a head among those of all sides.
#[cube]
pub(super) fn place_of_head(
    head: u32,
    first: Side,
    keys: Side,
    values: Side,
    #[comptime] of_layer: bool,
) -> Place {
    let mut place = Place {
        number: FIRST.runtime(),
        head,
        start: first.start,
        slots: first.slots,
        rows_each: first.rows_each,
        to_sequence: first.to_sequence,
        to_head: first.to_head,
        to_slot: first.to_slot,
    };
    if comptime!(of_layer) {
        let before_values = first.heads + keys.heads;
        if head >= before_values {
            place.number = VALUES.runtime();
            place.head = head - before_values;
            place.start = values.start;
            place.slots = values.slots;
            place.rows_each = values.rows_each;
            place.to_sequence = values.to_sequence;
            place.to_head = values.to_head;
            place.to_slot = values.to_slot;
        } else if head >= first.heads {
            place.number = KEYS.runtime();
            place.head = head - first.heads;
            place.start = keys.start;
            place.slots = keys.slots;
            place.rows_each = keys.rows_each;
            place.to_sequence = keys.to_sequence;
            place.to_head = keys.to_head;
            place.to_slot = keys.to_slot;
        }
    }
    place
}

/// Heads of all sides.
#[cube]
pub(super) fn all_heads(first: Side, keys: Side, values: Side, #[comptime] of_layer: bool) -> u32 {
    if comptime!(of_layer) {
        first.heads + keys.heads + values.heads
    } else {
        first.heads
    }
}
