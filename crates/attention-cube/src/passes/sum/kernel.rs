//! The sum of gradients' parts, rounded once.

use crate::math::rounding::rounded_vector;
use crate::passes::delta::kernel::is_blind;
use cubecl::prelude::*;

/// Sums `count` parts of the gradients, from `first` on and one after the other, a vector a unit. With the terms of queries,
/// `[batch, q_heads, 3, …]`, the gradient is the queries': 0 for one that sees nothing, whatever others of its tile have seen.
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
