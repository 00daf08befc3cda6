//! The source columns and the target layouts of the heads that a launch computes. A launch computes one kind of heads,
//! or a layer's queries, keys and values.

use cubecl::prelude::*;

/// The source columns and the target of the queries, keys or values. The target is `[sequences, heads, slots, columns]`
/// with contiguous columns.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct HeadLayout {
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

/// The layouts of a layer's queries, keys and values. If a launch computes only one kind of heads, the kernel reads
/// only `first`.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct QkvLayouts {
    /// The layout of a layer's queries. If the launch computes only one kind of heads, this layout is for that kind.
    pub first: HeadLayout,
    pub keys: HeadLayout,
    pub values: HeadLayout,
}

/// The value of [`CubeHead::kind`] for a layer's queries, or for the only kind of heads in the launch.
pub(super) const FIRST: u32 = 0;
/// The value of [`CubeHead::kind`] for a layer's keys.
pub(super) const KEYS: u32 = 1;
/// The value of [`CubeHead::kind`] for a layer's values.
pub(super) const VALUES: u32 = 2;

/// The head that a cube computes: its kind (query, key or value), its index, its source and its target.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct CubeHead {
    /// The kind of the head: [`FIRST`], [`KEYS`] or [`VALUES`].
    pub kind: u32,
    /// The index of the head among the heads of the same kind (queries, keys or values).
    pub index: u32,
    pub start: u32,
    pub slots: u32,
    pub rows_each: u32,
    pub to_sequence: u32,
    pub to_head: u32,
    pub to_slot: u32,
}

/// Finds the kind of a head (query, key or value), its index among the heads of that kind, and its layout. `head` is
/// the index among all heads.
#[cube]
pub(super) fn find_head(head: u32, layouts: QkvLayouts, #[comptime] of_layer: bool) -> CubeHead {
    let QkvLayouts {
        first,
        keys,
        values,
    } = layouts;
    let mut found = CubeHead {
        kind: FIRST.runtime(),
        index: head,
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
            found.kind = VALUES.runtime();
            found.index = head - before_values;
            found.start = values.start;
            found.slots = values.slots;
            found.rows_each = values.rows_each;
            found.to_sequence = values.to_sequence;
            found.to_head = values.to_head;
            found.to_slot = values.to_slot;
        } else if head >= first.heads {
            found.kind = KEYS.runtime();
            found.index = head - first.heads;
            found.start = keys.start;
            found.slots = keys.slots;
            found.rows_each = keys.rows_each;
            found.to_sequence = keys.to_sequence;
            found.to_head = keys.to_head;
            found.to_slot = keys.to_slot;
        }
    }
    found
}

/// Returns the number of heads that a launch computes, over queries, keys and values.
#[cube]
pub(super) fn count_heads(layouts: QkvLayouts, #[comptime] of_layer: bool) -> u32 {
    if comptime!(of_layer) {
        layouts.first.heads + layouts.keys.heads + layouts.values.heads
    } else {
        layouts.first.heads
    }
}
