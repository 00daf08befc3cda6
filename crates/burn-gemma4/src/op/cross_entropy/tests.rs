//! Tests that the kernel's losses and gradients agree with an f64 reference, for several sizes, soft caps and targets.

use super::*;
use crate::op::dequantize::tests::devices;
use burn::tensor::TensorData;
use rand::{Rng, SeedableRng, rngs::StdRng};

/// The tested numbers of rows and vocabulary sizes. The vocabulary sizes need different vector widths. Some vocabulary sizes
/// are smaller than the number of units in a cube, and some are larger.
const SIZES: [[usize; 2]; 5] = [[1, 1], [3, 7], [5, 64], [2, 4099], [4, 9000]];

/// Returns the exact losses, one per row, and the exact gradients of the logits, row by row.
fn exact(logits: &[f64], targets: &[i32], words: usize, cap: Option<f64>) -> (Vec<f64>, Vec<f64>) {
    let (mut losses, mut gradients) = (Vec::new(), Vec::new());
    for (row, target) in logits.chunks_exact(words).zip(targets) {
        let bounded: Vec<f64> = row
            .iter()
            .map(|x| cap.map_or(*x, |cap| (x / cap).tanh() * cap))
            .collect();
        let largest = bounded.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = bounded.iter().map(|x| (x - largest).exp()).sum();
        let logarithm = largest + sum.ln();
        let counts = f64::from(*target >= 0);
        let target = usize::try_from(*target).unwrap_or(0);
        losses.push(counts * (logarithm - bounded[target]));
        gradients.extend(bounded.iter().enumerate().map(|(column, x)| {
            let bend = cap.map_or(1.0, |cap| 1.0 - (x / cap).powi(2));
            let is_target = f64::from(column == target);
            counts * ((x - logarithm).exp() - is_target) * bend
        }));
    }
    (losses, gradients)
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

#[test]
fn cross_entropy_matches_reference() {
    let mut random = StdRng::seed_from_u64(2);
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            for ([rows, words], cap) in SIZES
                .into_iter()
                .flat_map(|size| [None, Some(30.0), Some(2.0)].map(|cap| (size, cap)))
            {
                let what = format!("{device:?}, {dtype:?}, {rows} × {words}, {cap:?}");
                let numbers = (0..rows * words).map(|_| random.random_range(-40.0f32..40.0));
                let data = TensorData::new(numbers.collect(), [rows, words]);
                let logits = Tensor::<2>::from_data(data, (&device, DType::F32)).cast(dtype);
                let targets: Vec<i32> = (0..rows)
                    .map(|row| match row % 3 {
                        1 => -1 - row as i32,
                        _ => random.random_range(0..words as i32),
                    })
                    .collect();
                let (losses, gradients) = exact(&values(logits.clone()), &targets, words, cap);
                let targets = Tensor::<1, Int>::from_data(&targets[..], &device);
                // Compute the gradient twice. The first call must not overwrite the logits, because `kept` shares the
                // buffer. The second call may overwrite the logits.
                let kept = logits.clone();
                let before = values(kept.clone());
                let (alone, none) = cross_entropy(logits.clone(), targets.clone(), cap, false);
                assert!(none.is_none());
                let (first, of_first) = cross_entropy(logits, targets.clone(), cap, true);
                assert_eq!(
                    values(kept.clone()),
                    before,
                    "{what}: shared logits were overwritten"
                );
                let (second, of_second) = cross_entropy(kept, targets, cap, true);
                for found in [alone, first, second] {
                    for (found, loss) in values(found).into_iter().zip(&losses) {
                        let error = (found - loss).abs();
                        assert!(
                            error <= 2e-6 * loss.abs().max(40.0),
                            "{what}: loss {found}, expected {loss}"
                        );
                    }
                }
                // In half precision, allow an error of one unit in the last place for numbers between 0.5 and 1.
                let rounding = match dtype {
                    DType::F16 => 2f64.powi(-11),
                    DType::BF16 => 2f64.powi(-8),
                    _ => 4e-6,
                };
                for found in [of_first, of_second] {
                    let found = values(found.expect("the gradient was requested"));
                    assert_eq!(found.len(), gradients.len());
                    for (found, exact) in found.into_iter().zip(&gradients) {
                        let error = (found - exact).abs();
                        assert!(
                            error <= rounding,
                            "{what}: gradient {found}, expected {exact}"
                        );
                    }
                }
            }
        }
    }
}

/// Checks that NaN logits give a NaN loss. Rows with negative targets give a loss and gradients of 0, even if they
/// contain NaN.
#[test]
fn cross_entropy_with_cap_propagates_nan() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows = [
        [1.0, nan, 3.0],
        [nan, nan, nan],
        [inf, -inf, 0.0],
        [nan, inf, 1.0],
        [1.0, 2.0, 3.0],
    ];
    for device in devices() {
        for dtype in [DType::F32, DType::F16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            let data = TensorData::new(rows.concat(), [5, 3]);
            let logits = Tensor::<2>::from_data(data, (&device, DType::F32)).cast(dtype);
            let targets = Tensor::<1, Int>::from_data([0, 1, 2, -1, 2], &device);
            let (losses, gradient) = cross_entropy(logits, targets, Some(30.0), true);
            let losses = values(losses);
            assert!(losses[0].is_nan() && losses[1].is_nan(), "{losses:?}");
            assert!((losses[2] - 30.0).abs() < 1e-4, "{losses:?}");
            assert_eq!(losses[3], 0.0);
            let gradient = values(gradient.expect("the gradient was requested"));
            assert!(gradient[0].is_nan() && gradient[3..6].iter().all(|x| x.is_nan()));
            assert!(gradient[6..].iter().all(|x| x.is_finite()), "{gradient:?}");
            assert_eq!(gradient[9..12], [0.0; 3]);
        }
    }
}

#[test]
fn cross_entropy_of_ignored_rows_is_zero() {
    for device in devices() {
        let data = TensorData::new(vec![f32::NAN, 1.0, 1.0, 2.0], [2, 2]);
        let logits = Tensor::<2>::from_data(data, &device);
        let targets = Tensor::<1, Int>::from_data([-1, 0], &device);
        let (losses, gradient) = cross_entropy(logits, targets, None, true);
        assert_eq!(values(losses)[0], 0.0);
        assert_eq!(
            values(gradient.expect("the gradient was requested"))[..2],
            [0.0; 2]
        );
    }
}

/// Checks that small gradients are not lost in rounding. All 8192 probabilities of a row are equal, and the gradients of
/// a row must sum to 0.
#[test]
fn cross_entropy_keeps_small_probabilities_in_half_precision() {
    for device in devices() {
        for dtype in [DType::F16, DType::BF16] {
            if !device.supports_dtype(dtype) {
                continue;
            }
            let logits = Tensor::<2>::zeros([2, 8192], (&device, dtype));
            let targets = Tensor::<1, Int>::from_data([5, 8191], &device);
            let (_, gradient) = cross_entropy(logits, targets, Some(30.0), true);
            for row in values(gradient.expect("the gradient was requested")).chunks_exact(8192) {
                let sum: f64 = row.iter().sum();
                assert!(sum.abs() < 0.02, "{dtype:?}: {sum}");
            }
        }
    }
}

/// Checks more rows than a launch grid can have cubes in one dimension. The number of rows is prime, so no grid has exactly
/// one cube per row.
#[test]
fn cross_entropy_of_many_rows_covers_all() {
    const ROWS: usize = 65_537;
    for device in devices() {
        let logits = Tensor::<2>::zeros([ROWS, 4], &device);
        let targets = Tensor::<1, Int>::zeros([ROWS], &device);
        let (losses, gradient) = cross_entropy(logits, targets, None, true);
        let losses = values(losses);
        assert!(losses.iter().all(|loss| (loss - 4f64.ln()).abs() < 1e-6));
        let gradient = values(gradient.expect("the gradient was requested"));
        assert_eq!(gradient.len(), 4 * ROWS);
        assert!(
            gradient
                .chunks_exact(4)
                .all(|row| (row[0] + 0.75).abs() < 1e-6)
        );
    }
}

#[test]
fn cross_entropy_without_cap_propagates_nan() {
    for device in devices() {
        let numbers = [1.0, f32::NAN, 3.0, 0.5, f32::INFINITY, 1.0, 1.0, 2.0, 3.0];
        let logits = Tensor::<2>::from_data(TensorData::new(numbers.to_vec(), [3, 3]), &device);
        let targets = Tensor::<1, Int>::from_data([0, 1, 2], &device);
        let (losses, gradient) = cross_entropy(logits, targets, None, true);
        let losses = values(losses);
        assert!(losses[0].is_nan() && losses[1].is_nan(), "{losses:?}");
        assert!((losses[2] - 0.40760596).abs() < 1e-6, "{losses:?}");
        let gradient = values(gradient.expect("the gradient was requested"));
        assert!(gradient[0].is_nan() && gradient[6..].iter().all(|x| x.is_finite()));
    }
}
