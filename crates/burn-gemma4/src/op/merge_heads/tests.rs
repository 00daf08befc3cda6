//! Tests that `rows_of_heads` agrees with a permutation of the tensor's dimensions, for heads in several memory
//! layouts.

use super::*;
use crate::op;
use burn::tensor::{DType, Device, Distribution};

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

#[test]
fn rows_of_heads_matches_permutation() {
    let device = Device::default();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !op::serves(&device, dtype) {
            continue;
        }
        for [sequences, heads, positions, channels] in [[1, 8, 4, 64], [2, 3, 2, 10], [1, 1, 3, 7]]
        {
            let shape = [sequences, heads, positions, channels];
            let drawn = Tensor::<4>::random(shape, Distribution::Default, &device).cast(dtype);
            let other_order = drawn.clone().swap_dims(1, 2) + 0.0;
            for heads_first in [drawn.clone(), other_order.swap_dims(1, 2)] {
                let rows = [sequences * positions, heads * channels];
                let expected = heads_first.clone().swap_dims(1, 2).reshape(rows);
                let found = rows_of_heads(heads_first);
                assert_eq!(found.dims(), rows);
                assert_eq!(values(found), values(expected), "{shape:?} {dtype:?}");
            }
        }
    }
}
