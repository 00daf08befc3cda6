//! Adds up the splits of a GEMM.

use cubecl::prelude::*;

/// Adds up the sums of all splits, `[splits, vectors]`, in ascending order, and rounds the total once.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn add_splits<E: Float, N: Size>(
    sums: &Tensor<Vector<f32, N>>,
    output: &mut Tensor<Vector<E, N>>,
    vectors: u32,
    #[comptime] splits: usize,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let vector = ABSOLUTE_POS;
    if vector < vectors as usize {
        let mut sum = Vector::<f32, N>::zeroed();
        #[unroll]
        for split in 0..splits {
            sum += sums[split * vectors as usize + vector];
        }
        output[vector] = Vector::<E, N>::cast_from(sum);
    }
}
