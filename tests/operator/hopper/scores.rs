//! Tests of scores with a scale of any sign and size, of NaN scores, and of the lowest finite number as a score.

use super::{WIDTHS, check, check_poisoned, hopper_devices, sized};
use crate::biases::check_lowest;
use crate::case::{Case, FULL};
use crate::empty_rows::check_beside_nan;
use burn::tensor::DType;

/// Checks negative, zero, common and tiny scales. With a scale of zero or below, the largest QK product does not give
/// the largest score. Kernels must therefore multiply by the scale before they take the row maximum.
#[test]
fn wgmma_any_scale_matches_reference() {
    for scale in [-0.3, 0.0, 1.0, 1e-31] {
        for (head_dim, value_dim) in [(64, 64), (512, 512)] {
            check(Case {
                scale: Some(scale),
                ..sized([head_dim, value_dim])
            });
        }
    }
}

/// Checks tiles in which some queries see NaN and others see no key, and biases that hold the lowest finite number.
#[test]
fn wgmma_nan_and_lowest_bias_match_reference() {
    if hopper_devices().is_empty() {
        return;
    }
    let lowest = [
        (DType::BF16, true, f64::from(f32::MIN)),
        (DType::BF16, false, f64::from(f32::from_bits(0xFF7F_0000))),
        (DType::F16, false, -65504.0),
        (DType::F16, true, -1e30),
    ];
    for (index, (head_dim, value_dim)) in WIDTHS.into_iter().enumerate() {
        for [q_len, kv_len] in [[140, 270], [2, 3000]] {
            let sizes = [1, 4, 2, q_len, kv_len, head_dim, value_dim];
            check_beside_nan(sizes, DType::BF16, index % 2 == 0);
            let (dtype, f32_extras, lowest) = lowest[index % lowest.len()];
            let case = Case {
                dtype,
                f32_extras,
                bias: Some(FULL),
                ..Case::new(sizes)
            };
            check_lowest(&case, lowest);
        }
    }
}

/// Checks scores far beyond the range of half precision.
#[test]
fn wgmma_scores_beyond_half_precision_match_reference() {
    for dtype in [DType::F16, DType::BF16] {
        for (head_dim, value_dim) in [(64, 64), (256, 256), (512, 512)] {
            let case = Case {
                dtype,
                scale: Some(1.0),
                amplitude: 8.0,
                ..sized([head_dim, value_dim])
            };
            check_poisoned(&case, |_| {});
        }
    }
}
