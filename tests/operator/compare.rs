//! Closeness to the oracle, in units of what the dtype can do.
//!
//! A result may err twice as much as the same mathematics in the same dtype does (the reference on the
//! CPU), in root mean square and at the worst element, plus a floor that only rounding explains:
//!
//! - Adding `n` terms one after the other in a dtype of precision ε errs by about `ε·√(n/2)` of the sum
//!   (n roundings, each relative to a partial sum that grows as a random walk does). Floor: `4·ε·√n`.
//! - Softmax gradients cancel: `dp − Δ` errs by ε of `dp`, however small the difference is. Floor: `4·ε`
//!   of the size that the terms have, which the caller knows.
//! - The result is rounded once to the storage dtype: a quarter of its ε in root mean square, half at worst.
//! - The backward has the output as it is stored, so that Δ errs as much: half of the storage's ε of the
//!   terms that Δ takes part in. The definition's own gradient never rounds the output.
//!
//! For f32 and a few hundred terms that is 10⁻⁵; wrong mathematics shows at 10⁻³ and above.

use crate::dense::rms;
use burn::tensor::DType;

/// How many roundings stand between the inputs and a result.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// Of the inputs and results.
    pub dtype: DType,
    /// The longest sum.
    pub terms: usize,
}

impl Precision {
    fn compute(self) -> f64 {
        if self.dtype == DType::F64 {
            f64::EPSILON
        } else {
            f64::from(f32::EPSILON)
        }
    }

    fn storage(self) -> f64 {
        match self.dtype {
            DType::F64 => f64::EPSILON,
            DType::F32 => f64::from(f32::EPSILON),
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            other => panic!("no test is written for {other:?}"),
        }
    }
}

/// One result of a run.
#[derive(Clone, Debug)]
pub struct Named {
    pub name: &'static str,
    pub values: Vec<f64>,
    /// The size of the terms that cancel in it; 0 where none do.
    pub magnitude: f64,
    /// The size of those among them that the stored output enters.
    pub stored: f64,
}

/// Asserts that `got` is as close to `exact` as `baseline` and the dtype allow; see the module.
#[track_caller]
pub fn assert_close(
    context: &str,
    got: &Named,
    exact: &Named,
    baseline: &Named,
    precision: Precision,
) {
    let name = exact.name;
    assert_eq!(
        got.values.len(),
        exact.values.len(),
        "{context}: {name} has another size"
    );
    for (index, (got, exact)) in got.values.iter().zip(&exact.values).enumerate() {
        let fits = if exact.is_finite() {
            got.is_finite()
        } else {
            got == exact
        };
        assert!(
            fits,
            "{context}: {name}[{index}] is {got}, and it should be {exact}"
        );
    }
    let finite: Vec<f64> = exact
        .values
        .iter()
        .copied()
        .filter(|x| x.is_finite())
        .collect();
    let largest = finite
        .iter()
        .fold(0.0f64, |largest, x| largest.max(x.abs()));
    let (error, worst) = errors(&got.values, &exact.values);
    let (base_error, (_, base_worst)) = errors(&baseline.values, &exact.values);

    let compute = 4.0 * precision.compute();
    let sums = compute * (precision.terms as f64).sqrt();
    let cancelled = compute * exact.magnitude + precision.storage() / 2.0 * exact.stored;
    let limit = 2.0 * base_error + (sums + precision.storage() / 4.0) * rms(&finite) + cancelled;
    // The worst of many normally distributed errors is a few times their size, and more where few rows
    // have all there is.
    let peak = (largest / rms(&finite).max(f64::MIN_POSITIVE)).max(4.0);
    let worst_limit =
        2.0 * base_worst + (sums + precision.storage() / 2.0) * largest + peak * cancelled;
    assert!(
        error <= limit && worst.1 <= worst_limit,
        "{context}: {name} errs by {error:.2e} (allowed {limit:.2e}, the same mathematics on the CPU \
         {base_error:.2e}) of {:.2e} in root mean square, and at most by {:.2e} (allowed \
         {worst_limit:.2e}, CPU {base_worst:.2e}) at [{}]: {} instead of {}",
        rms(&finite),
        worst.1,
        worst.0,
        got.values[worst.0],
        exact.values[worst.0],
    );
}

/// The root mean square of the error, and where it is largest with its size; over the finite elements.
fn errors(got: &[f64], exact: &[f64]) -> (f64, (usize, f64)) {
    let differences: Vec<f64> = got
        .iter()
        .zip(exact)
        .map(|(got, exact)| {
            if got == exact {
                0.0
            } else {
                (got - exact).abs()
            }
        })
        .collect();
    let worst = differences
        .iter()
        .copied()
        .enumerate()
        .fold(
            (0, 0.0),
            |worst, next| if next.1 > worst.1 { next } else { worst },
        );
    (rms(&differences), worst)
}
