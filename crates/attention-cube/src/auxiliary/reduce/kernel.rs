//! Adds up partial gradients in f32, and rounds the sum once.

use crate::auxiliary::delta::kernel::is_blind;
use crate::math::rounding::rounded_vector;
use cubecl::prelude::*;

/// Adds up `count` partial gradients, which lie one after another, starting at element `first`. Each unit computes one
/// vector of the sum.
///
/// `rows` is the LSE/delta tensor `[batch, q_heads, 5, …]`, present only for the gradient of the queries. With `rows`,
/// the kernel sets the gradient of a query that sees no key to 0. The reason is that the partial gradients of a query
/// without visible keys may contain NaN. The NaN comes from keys that other queries of the tile see.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sum_parts<E: Float, N: Size>(
    gradients: &Tensor<Vector<f32, N>>,
    rows: ComptimeOption<&Tensor<f32>>,
    target: &mut Tensor<Vector<E, N>>,
    first: usize,
    count: u32,
    vectors: usize,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let index = ABSOLUTE_POS;
    if index >= vectors {
        terminate!();
    }
    let mut sum = Vector::<f32, N>::new(0.0);
    for part in 0..count as usize {
        sum += gradients[first + part * vectors + index];
    }
    #[comptime]
    match &rows {
        ComptimeOption::Some(rows) => {
            let row = index * target.vector_size() / target.shape(3);
            let plane = row / target.shape(2);
            if is_blind(rows[plane * rows.stride(1) + row % target.shape(2)]) {
                sum = Vector::<f32, N>::new(0.0);
            }
        }
        ComptimeOption::None => {}
    }
    target[index] = rounded_vector::<E, N>(sum);
}

/// The number of units per cube of [`sum_splits`].
#[cfg(feature = "cuda")]
pub(crate) const UNITS: usize = 128;

/// Adds up the `count` partial sums (splits) of a gradient, which lie one after another. `sharing` units work on one
/// vector of the sum. Each of these units adds up every `sharing`-th split, and the first unit adds the units' results
/// in order.
///
/// Budget: 2 KB of shared memory. Bound: memory. For small splits, the bound is latency.
#[cfg(feature = "cuda")]
#[cube(launch_unchecked, address_type = "dynamic")]
pub(crate) fn sum_splits<E: Float, N: Size>(
    splits: &Tensor<Vector<f32, N>>,
    target: &mut Tensor<Vector<E, N>>,
    count: u32,
    vectors: usize,
    #[comptime] sharing: usize,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let columns = comptime!(UNITS / sharing);
    let unit = UNIT_POS as usize;
    let index = CUBE_POS * columns + unit % columns;
    let exists = index < vectors;
    let mut sum = Vector::<f32, N>::new(0.0);
    let mut split = unit / columns;
    let end = select(exists, count as usize, 0usize);
    while split < end {
        sum += splits[split * vectors + index];
        split += sharing;
    }
    let mut sums = Shared::<[Vector<f32, N>]>::new_slice(UNITS);
    sums[unit] = sum;
    sync_cube();
    if exists && unit < columns {
        #[unroll]
        for other in 1..sharing {
            sum += sums[unit + other * columns];
        }
        target[index] = rounded_vector::<E, N>(sum);
    }
}
