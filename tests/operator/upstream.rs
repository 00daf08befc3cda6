//! Tests that detect faults of Burn's own operations. These faults affect gradients of attention (`docs/upstream.md`).
//! A test of a fault passes as long as Burn has the fault. Once Burn is fixed, the test fails and names what to remove.

use crate::dense::read;
use crate::devices::{TestDevice, cube_devices};
use burn::tensor::{Device, Distribution, Tensor};

/// Returns two sums of the same random tensor over the dimension `axis`: one computed on `device`, and one on the CPU.
/// The tensor has the shape `stored` in memory, and `order` permutes its dimensions before the sum.
fn sums<const D: usize>(
    device: &Device,
    stored: [usize; D],
    order: [isize; D],
    axis: usize,
) -> [Vec<f64>; 2] {
    let flex = Device::flex();
    let values = Tensor::<D>::random(stored, Distribution::Normal(0.0, 1.0), &flex).into_data();
    [device, &flex].map(|device| {
        let sum = Tensor::<D>::from_data(values.clone(), device)
            .permute(order)
            .sum_dim(axis);
        let data = sum.into_data().convert::<f64>();
        data.iter::<f64>().collect()
    })
}

fn is_near([found, expected]: &[Vec<f64>; 2]) -> bool {
    let mut pairs = found.iter().zip(expected);
    pairs.all(|(found, expected)| (found - expected).abs() <= 1e-4)
}

#[test]
fn sum_of_a_permuted_tensor_of_rank_4_is_wrong_in_burn() {
    for TestDevice { name, device } in cube_devices() {
        let sums = sums(&device, [3, 4, 4, 4], [0, 3, 2, 1], 0);
        assert!(
            !is_near(&sums),
            "{name}: Burn sums permuted tensors right again; remove its section of docs/upstream.md and this test",
        );
    }
}

/// Checks that Burn's gradient of `x.sum_dim(1).permute(…) * w` is wrong. The reason is a wrong sum over a permuted
/// tensor.
#[test]
fn gradient_of_a_permuted_sum_is_wrong_in_burn() {
    let flex = Device::flex();
    let weights = Tensor::<4>::random([1, 8, 4, 1], Distribution::Normal(0.0, 1.0), &flex);
    let weights = weights.into_data();
    let gradient = |device: &Device| {
        let device = device.clone().autodiff();
        let x = Tensor::<4>::ones([1, 3, 4, 8], &device).require_grad();
        let permuted = x.clone().sum_dim(1).permute([1, 3, 2, 0]);
        let weights = Tensor::<4>::from_data(weights.clone(), &device);
        let gradients = (permuted * weights).sum().backward();
        read(x.grad(&gradients).expect("x is a leaf"))
    };
    let expected = gradient(&flex);
    for TestDevice { name, device } in cube_devices() {
        assert!(
            !is_near(&[gradient(&device), expected.clone()]),
            "{name}: Burn's gradient of a permuted sum is right again; see the test before this one",
        );
    }
}

/// Checks that sums of permuted tensors with three dimensions are correct in Burn. The Gemma model's own sums of permuted
/// tensors therefore need no workaround.
#[test]
fn sum_of_a_permuted_tensor_of_rank_3_is_right_in_burn() {
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for TestDevice { name, device } in cube_devices() {
        for order in orders {
            for axis in 0..3 {
                let sums = sums(&device, [4, 8, 12], order, axis);
                assert!(is_near(&sums), "{name}: {order:?}, axis {axis}");
            }
        }
    }
}

/// Checks a sum over the dimension that is contiguous in memory, for a tensor with four dimensions. The sum must be correct,
/// because the model's norms over permuted heads are such sums.
#[test]
fn sum_over_contiguous_columns_of_rank_4_is_right_in_burn() {
    for TestDevice { name, device } in cube_devices() {
        for order in [[0, 2, 1, 3], [1, 0, 2, 3], [2, 1, 0, 3], [1, 2, 0, 3]] {
            let sums = sums(&device, [4, 4, 8, 16], order, 3);
            assert!(is_near(&sums), "{name}: {order:?}");
        }
    }
}
