//! The sides of a launch that computes heads. A side is the queries, the keys or the values. A launch has only one side, or all
//! three sides of a layer. Each head has its own cube.

use cubecl::prelude::*;

/// The source columns and the target of the queries, keys or values in a launch. The target is
/// `[sequences, heads, slots, columns]` with contiguous columns.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Side {
    /// The first column of the heads in the projection's output.
    pub start: u32,
    pub heads: u32,
    pub slots: u32,
    /// The number of projection rows per sequence.
    pub rows_each: u32,
    pub to_sequence: u32,
    pub to_head: u32,
    pub to_slot: u32,
}

/// The value of [`Place::number`] for a layer's queries, or for the only heads that a launch computes.
pub(super) const FIRST: u32 = 0;
/// A layer's keys.
pub(super) const KEYS: u32 = 1;
/// A layer's values.
pub(super) const VALUES: u32 = 2;

/// The head that a cube computes. The fields say whether it is a query, key or value head, its index among the heads of that
/// kind, and their source and target.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Place {
    pub number: u32,
    /// The index of the head among the query, key or value heads of the launch.
    pub head: u32,
    pub start: u32,
    pub slots: u32,
    pub rows_each: u32,
    pub to_sequence: u32,
    pub to_head: u32,
    pub to_slot: u32,
}

/// Finds a head from its index `head` among all query, key and value heads of a launch.
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

/// Returns the number of query, key and value heads that a launch computes.
#[cube]
pub(super) fn all_heads(first: Side, keys: Side, values: Side, #[comptime] of_layer: bool) -> u32 {
    if comptime!(of_layer) {
        first.heads + keys.heads + values.heads
    } else {
        first.heads
    }
}
