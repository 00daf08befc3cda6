//! The heads of a projection. The kernel normalizes each head, multiplies the head by the norm's weight, and rotates
//! the head by the row's position. The kernel writes the head to a tensor of queries or to a slot of the KV cache. A
//! layer with its own KV cache computes queries, keys and values in one launch.
//!
//! Budget: shared memory holds one partial sum per plane, or per unit without plane operations. Registers hold one
//! channel pair per unit, or up to four without plane operations.
//!
//! Schedule: one cube per head, which reads its head once. If no launch writes the weights, tables and positions, the
//! kernel reads them before the wait for the previous launch.
//!
//! Bound: latency.

use super::layouts::{CubeHead, KEYS, QkvLayouts, VALUES, count_heads, find_head};
use crate::op::sums::{Team, first_cube_sum};
use cube_kit::pdl::{
    launch_dependents, load_element_now, mark_owned_volatile_if_present, mark_volatile,
    wait_prior_launch,
};
use cubecl::prelude::*;

/// The order in which the columns of the target hold a head's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum RopeColumns {
    /// The order of the channels in the projection's output.
    Channels,
    /// The order of values in a KV cache that stores only the rotated channels of keys. RoPE rotates keys in only some
    /// of the channels. A slot has three groups of channels: the value in the rotated channels, the value in the other
    /// channels, and the key in the rotated channels. The first two groups form the value, and the last two groups form
    /// the key.
    CompactValues,
    /// The order of keys in a KV cache that stores only the rotated channels of keys. The slot holds these channels
    /// after the value.
    CompactKeys,
    /// The order of queries for a KV cache that stores only the rotated channels of keys. The rotated channels come
    /// last, as in a key.
    CompactQueries,
}

/// Returns the target column of one channel of `pair`: of the second channel if `second` is true, and otherwise of the
/// first channel. RoPE rotates only the first `rotated` pairs.
#[cube]
fn column(
    pair: u32,
    pairs: u32,
    rotated: u32,
    #[comptime] second: bool,
    #[comptime] columns: RopeColumns,
) -> u32 {
    let behind = if comptime!(second) {
        select(pair < rotated, rotated, pairs)
    } else {
        select(pair < rotated, 0u32, rotated)
    };
    let of_values = pair + behind;
    if comptime!(columns == RopeColumns::Channels && second) {
        pair + pairs
    } else if comptime!(columns == RopeColumns::Channels) {
        pair
    } else if comptime!(columns == RopeColumns::CompactValues) {
        of_values
    } else if comptime!(columns == RopeColumns::CompactKeys) {
        of_values + 2u32 * pairs
    } else {
        (of_values + 2u32 * (pairs - rotated)) % (2u32 * pairs)
    }
}

/// The compile-time plan of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct HeadsPlan {
    pub columns: RopeColumns,
    pub team: Team,
    /// The number of channel pairs that a unit keeps in registers.
    pub held: usize,
    /// True if the launch also computes the layer's keys and values.
    pub of_layer: bool,
    pub pdl: bool,
    /// True if the kernel reads the weights, tables and positions before the previous launch has ended. No launch may
    /// write these tensors.
    pub reads_ahead: bool,
}

/// The weights of the RMS norms of a layer's heads, `[head_dim]` each. The norm of the values has no weight.
#[derive(CubeType, CubeLaunch)]
pub(super) struct HeadNormWeights<E: Float> {
    /// The weight of the RMS norm of a layer's queries, or of the only kind of heads in the launch.
    pub first: ComptimeOption<OwnedTensor<E>>,
    /// The weight of the RMS norm of a layer's keys.
    pub keys: ComptimeOption<OwnedTensor<E>>,
}

/// The cosines and sines of RoPE, `[positions, head_dim / 2]` each, and the position of each row, `[rows]`.
#[derive(CubeType, CubeLaunch)]
pub(super) struct RopeInputs<E: Float, I: Int> {
    pub cos: ComptimeOption<OwnedTensor<E>>,
    pub sin: ComptimeOption<OwnedTensor<E>>,
    /// The position of each row. If this tensor is absent, row `r` is at position `r % positions_in_order`.
    pub positions: ComptimeOption<OwnedTensor<I>>,
}

/// The tensors to which the heads are written, `[sequences, heads, slots, columns]` each.
#[derive(CubeType, CubeLaunch)]
pub(super) struct HeadTargets<E: Float> {
    /// The target of a layer's queries. If the launch computes only one kind of heads, this target is for that kind.
    pub first: OwnedTensor<E>,
    /// The targets of a layer's keys and values.
    pub keys: ComptimeOption<OwnedTensor<E>>,
    pub values: ComptimeOption<OwnedTensor<E>>,
}

/// The sizes of the projection, of a head and of the rotation tables.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct HeadSizes {
    /// The distance between the projection's rows, in elements.
    pub projected_stride: u32,
    pub rows: u32,
    /// The number of rows in the rotation tables. Without a tensor of positions, row `r` is at position
    /// `r % positions_in_order`.
    pub positions_in_order: u32,
    /// The number of channel pairs per head.
    pub pairs: u32,
    /// The number of rotated channel pairs per head if the KV cache stores only the rotated channels of keys. The
    /// number is 0 for other KV caches.
    pub rotated: u32,
}

/// Normalizes each head, rotates the head by RoPE, and writes the head to the queries or to a slot of the KV cache.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn apply_norm_rope_pdl<E: Float, I: Int>(
    projected: &Tensor<E>,
    weights: HeadNormWeights<E>,
    rope: RopeInputs<E, I>,
    targets: &mut HeadTargets<E>,
    layouts: QkvLayouts,
    sizes: HeadSizes,
    epsilon: f32,
    #[comptime] plan: HeadsPlan,
    #[define(E, I)] _elements: [ElemType; 2],
) {
    let HeadSizes {
        projected_stride,
        rows,
        positions_in_order,
        pairs,
        rotated,
    } = sizes;
    launch_dependents(plan.pdl);
    let computed = comptime!(plan.pdl && !plan.reads_ahead);
    wait_prior_launch(computed);
    mark_owned_volatile_if_present(&weights.first, computed);
    mark_owned_volatile_if_present(&weights.keys, computed);
    mark_owned_volatile_if_present(&rope.cos, computed);
    mark_owned_volatile_if_present(&rope.sin, computed);
    mark_owned_volatile_if_present(&rope.positions, computed);
    let team = comptime!(plan.team);
    let held = comptime!(plan.held);
    let heads = count_heads(layouts, plan.of_layer);
    let head = find_head(CUBE_POS as u32 % heads, layouts, plan.of_layer);
    let row = CUBE_POS as u32 / heads;
    // A cube without a row returns at once, without a wait for the previous launch. All other cubes wait, so this
    // launch as a whole cannot end before the previous launch.
    if row >= rows {
        terminate!();
    }
    let from = row as usize * projected_stride as usize
        + head.start as usize
        + head.index as usize * 2 * pairs as usize;
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let mut position = row % positions_in_order;
    let mut slot = row % head.rows_each;
    #[comptime]
    match &rope.positions {
        ComptimeOption::Some(positions) => {
            let at = load_element_now(positions.as_slice(), row as usize, plan.reads_ahead);
            position = u32::cast_from(at);
            slot = position % head.slots;
        }
        ComptimeOption::None => {}
    }

    // Issue all loads before the first use, except loads that must wait for the previous launch.
    let mut firsts = Array::<E>::new(held);
    let mut seconds = Array::<E>::new(held);
    let mut first_weights = Array::<E>::new(held);
    let mut second_weights = Array::<E>::new(held);
    let mut cosines = Array::<E>::new(held);
    let mut sines = Array::<E>::new(held);
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < pairs {
            let (low, high) = (pair as usize, (pair + pairs) as usize);
            #[comptime]
            match &weights.first {
                ComptimeOption::Some(weight) => {
                    first_weights[index] = load_weight(weight, &weights.keys, head, low, plan);
                    second_weights[index] = load_weight(weight, &weights.keys, head, high, plan);
                }
                ComptimeOption::None => {}
            }
        }
    }
    if comptime!(plan.reads_ahead) {
        load_tables(&rope, position, pairs, &mut cosines, &mut sines, plan);
    }
    wait_prior_launch(comptime!(plan.pdl && plan.reads_ahead));
    mark_volatile(projected, plan.pdl);
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < pairs {
            firsts[index] = projected[from + pair as usize];
            seconds[index] = projected[from + (pair + pairs) as usize];
        }
    }
    if comptime!(!plan.reads_ahead) {
        load_tables(&rope, position, pairs, &mut cosines, &mut sines, plan);
    }

    let mut squares = 0.0f32;
    #[unroll]
    for index in 0..held {
        if UNIT_POS + comptime!((index * team.units) as u32) < pairs {
            let (first, second) = (
                f32::cast_from(firsts[index]),
                f32::cast_from(seconds[index]),
            );
            squares += first * first + second * second;
        }
    }
    let mean = first_cube_sum(squares, &mut partial, team) / (2u32 * pairs) as f32;
    let factor = 1.0f32 / (mean + epsilon).sqrt();

    let to = (row / head.rows_each) as usize * head.to_sequence as usize
        + head.index as usize * head.to_head as usize
        + slot as usize * head.to_slot as usize;
    let written_pairs = if comptime!(plan.columns == RopeColumns::CompactKeys) {
        rotated
    } else {
        pairs
    };
    #[unroll]
    for index in 0..held {
        let pair = UNIT_POS + comptime!((index * team.units) as u32);
        if pair < written_pairs {
            let mut first = f32::cast_from(firsts[index]) * factor;
            let mut second = f32::cast_from(seconds[index]) * factor;
            #[comptime]
            match &weights.first {
                ComptimeOption::Some(_) => {
                    first *= f32::cast_from(first_weights[index]);
                    second *= f32::cast_from(second_weights[index]);
                }
                ComptimeOption::None => {}
            }
            // Round to the element type before the rotation, because the norm kernel stores its output in this type.
            // The results then equal those of separate kernels.
            first = f32::cast_from(E::cast_from(first));
            second = f32::cast_from(E::cast_from(second));
            #[comptime]
            match &rope.cos {
                ComptimeOption::Some(_) => {
                    let c = f32::cast_from(cosines[index]);
                    let s = f32::cast_from(sines[index]);
                    let turns = head.kind != VALUES;
                    let turned = first * c - second * s;
                    second = select(turns, second * c + first * s, second);
                    first = select(turns, turned, first);
                }
                ComptimeOption::None => {}
            }
            let low = to + column(pair, pairs, rotated, false, plan.columns) as usize;
            let high = to + column(pair, pairs, rotated, true, plan.columns) as usize;
            let (first, second) = (E::cast_from(first), E::cast_from(second));
            if head.kind == KEYS {
                write(&mut targets.keys, low, first);
                write(&mut targets.keys, high, second);
            } else if head.kind == VALUES {
                write(&mut targets.values, low, first);
                write(&mut targets.values, high, second);
            } else {
                targets.first[low] = first;
                targets.first[high] = second;
            }
        }
    }
}

/// Loads the norm weight of a channel. The weight is 1 for a layer's values, whose norm has no weight.
#[cube]
fn load_weight<E: Float>(
    weight: &Tensor<E>,
    key_weight: &ComptimeOption<OwnedTensor<E>>,
    head: CubeHead,
    channel: usize,
    #[comptime] plan: HeadsPlan,
) -> E {
    #[comptime]
    match key_weight {
        ComptimeOption::Some(key_weight) => {
            let mut of_channel = E::new(1.0);
            if head.kind == KEYS {
                of_channel = load_element_now(key_weight.as_slice(), channel, plan.reads_ahead);
            } else if head.kind != VALUES {
                of_channel = load_element_now(weight.as_slice(), channel, plan.reads_ahead);
            }
            of_channel
        }
        ComptimeOption::None => load_element_now(weight.as_slice(), channel, plan.reads_ahead),
    }
}

/// Loads the cosines and sines of a unit's channel pairs, if the heads are rotated.
#[cube]
fn load_tables<E: Float, I: Int>(
    rope: &RopeInputs<E, I>,
    position: u32,
    pairs: u32,
    cosines: &mut Array<E>,
    sines: &mut Array<E>,
    #[comptime] plan: HeadsPlan,
) {
    #[unroll]
    for index in 0..plan.held {
        let pair = UNIT_POS + comptime!((index * plan.team.units) as u32);
        if pair < pairs {
            let at = position as usize * pairs as usize + pair as usize;
            #[comptime]
            match &rope.cos {
                ComptimeOption::Some(cos) => {
                    cosines[index] = load_element_now(cos.as_slice(), at, plan.reads_ahead);
                }
                ComptimeOption::None => {}
            }
            #[comptime]
            match &rope.sin {
                ComptimeOption::Some(sin) => {
                    sines[index] = load_element_now(sin.as_slice(), at, plan.reads_ahead);
                }
                ComptimeOption::None => {}
            }
        }
    }
}

/// Writes an element if the target exists.
#[cube]
fn write<E: Float>(target: &mut ComptimeOption<OwnedTensor<E>>, at: usize, value: E) {
    #[comptime]
    match target {
        ComptimeOption::Some(target) => {
            target[at] = value;
        }
        ComptimeOption::None => {}
    }
}
