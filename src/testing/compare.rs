//! Compares results with the reference implementation. The dtype determines the allowed error.
//!
//! The baseline is the result of the reference implementation in the same dtype. A result may have twice the error of
//! the baseline, both in root mean square and at the worst element. Rounding errors of four kinds are allowed in
//! addition, where ε is the precision of a dtype:
//!
//! - A sum of `n` terms that are added one after the other has a relative error of about `ε·√(n/2)`. The allowance is
//!   `4·ε·√n`.
//! - The gradient of the scores is `dS = P ∘ (dP − Δ)`. P are the probabilities, dP are the gradients of P, and Δ is
//!   the row sum of output ∘ output gradient. If dP and Δ cancel, the small difference still has an error of `ε·dP`.
//!   The allowance is `4·ε` times the magnitude of the cancelling terms. The caller provides this magnitude.
//! - The result is rounded once to the storage dtype. The allowance is a quarter of the storage dtype's ε in root mean
//!   square, and half of this ε at the worst element.
//! - The backward reads the stored output, so Δ inherits the rounding error of the stored output. The allowance is half
//!   of the storage dtype's ε, times the magnitude of the terms that are computed from Δ.
//!
//! For f32 and a few hundred terms, the allowed error is 10⁻⁵. Wrong mathematics causes errors of 10⁻³ and above.

use super::dense::rms;
use burn::tensor::DType;

/// The dtype of a result, and the largest number of addends of a sum in the computation. Both determine the result's
/// rounding errors.
#[derive(Clone, Copy, Debug)]
pub struct Precision {
    /// The dtype of the inputs and results.
    pub dtype: DType,
    /// The number of addends of the longest sum.
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
            other => panic!("tests do not support {other:?}"),
        }
    }
}

/// One result of a run, with its name: the output, the logsumexp or a gradient.
#[derive(Clone, Debug)]
pub struct Named {
    /// The name of the result.
    pub name: &'static str,
    /// The elements of the result.
    pub values: Vec<f64>,
    /// The total magnitude of the addends that cancel each other in the result, or 0 if no addends cancel.
    pub magnitude: f64,
    /// The total magnitude of those cancelling addends that are computed from the stored output. They are counted
    /// separately, because the stored output has been rounded to the dtype.
    pub stored: f64,
}

/// The error of a result and the allowed error of the result. The module's documentation defines the allowed error.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The name of the result.
    pub name: &'static str,
    /// The root mean square of the finite elements of the exact result.
    pub size: f64,
    /// The error of the result.
    pub error: Deviation,
    /// The error of the baseline, which is the reference implementation in the same dtype.
    pub baseline: Deviation,
    /// The allowed error of the result.
    pub allowed: Deviation,
    /// The element with the largest error: its index, its value in the result, and its expected value.
    pub worst: (usize, f64, f64),
    /// The first element that is infinite or NaN although a finite value is expected, or that differs from an expected
    /// infinity. The tuple holds the element's index, its value in the result, and its expected value.
    pub misplaced: Option<(usize, f64, f64)>,
}

/// The error of a result: the root mean square over all elements, and the error of the worst element.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    /// The root mean square of the elements' errors.
    pub mean: f64,
    /// The error of the worst element.
    pub worst: f64,
}

impl Comparison {
    /// Compares `got` with `exact`. `baseline` and the dtype determine the allowed error.
    ///
    /// # Panics
    /// Panics if the results differ in their number of elements.
    #[track_caller]
    pub fn new(got: &Named, exact: &Named, baseline: &Named, precision: Precision) -> Self {
        let name = exact.name;
        assert_eq!(
            got.values.len(),
            exact.values.len(),
            "{name} has another size"
        );
        let fits = |got: f64, exact: f64| match exact.is_finite() {
            true => got.is_finite(),
            false => got == exact,
        };
        let mut pairs = got.values.iter().copied().zip(exact.values.iter().copied());
        let misplaced = pairs
            .position(|(got, exact)| !fits(got, exact))
            .map(|index| (index, got.values[index], exact.values[index]));
        let finite: Vec<f64> = exact
            .values
            .iter()
            .copied()
            .filter(|x| x.is_finite())
            .collect();
        let size = rms(&finite);
        let largest = finite
            .iter()
            .fold(0.0f64, |largest, x| largest.max(x.abs()));
        let (error, at) = deviation(&got.values, &exact.values);
        let (baseline, _) = deviation(&baseline.values, &exact.values);
        // The baseline raises the allowed error only if its own error is finite.
        let explained = |error: f64| if error.is_finite() { 2.0 * error } else { 0.0 };

        let compute = 4.0 * precision.compute();
        let sums = compute * (precision.terms as f64).sqrt();
        let cancelled = compute * exact.magnitude + precision.storage() / 2.0 * exact.stored;
        // Cancelling terms raise both limits: the limit of the root mean square error by `cancelled`, and the limit of
        // the largest error by `peak` times as much.
        // `peak` is at least 4, because the largest of many normally distributed errors is a few times their root mean
        // square. `peak` is larger if a few rows have nearly all of the result's magnitude.
        let peak = (largest / size.max(f64::MIN_POSITIVE)).max(4.0);
        let allowed = Deviation {
            mean: explained(baseline.mean) + (sums + precision.storage() / 4.0) * size + cancelled,
            worst: explained(baseline.worst)
                + (sums + precision.storage() / 2.0) * largest
                + peak * cancelled,
        };
        let value = |values: &[f64]| values.get(at).copied().unwrap_or_default();
        Self {
            name,
            size,
            error,
            baseline,
            allowed,
            worst: (at, value(&got.values), value(&exact.values)),
            misplaced,
        }
    }

    /// True if the error is within the allowed error.
    pub fn is_close(&self) -> bool {
        self.misplaced.is_none()
            && self.error.mean <= self.allowed.mean
            && self.error.worst <= self.allowed.worst
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            name,
            size,
            error,
            baseline,
            allowed,
            ..
        } = self;
        if let Some((index, got, exact)) = self.misplaced {
            return write!(f, "{name}[{index}] is {got}, but should be {exact}");
        }
        let (index, got, exact) = self.worst;
        write!(
            f,
            "{name} has an error of {:.2e} (allowed {:.2e}, baseline {:.2e}) of {size:.2e} in root mean square, \
             and at most {:.2e} (allowed {:.2e}, baseline {:.2e}) at [{index}]: {got} instead of {exact}",
            error.mean, allowed.mean, baseline.mean, error.worst, allowed.worst, baseline.worst,
        )
    }
}

/// Asserts that the error of `got` is at most the error that `baseline` and the dtype allow.
///
/// # Panics
/// Panics with `context` and the error if the error is larger than allowed.
#[track_caller]
pub fn assert_close(
    context: &str,
    got: &Named,
    exact: &Named,
    baseline: &Named,
    precision: Precision,
) {
    let comparison = Comparison::new(got, exact, baseline, precision);
    assert!(comparison.is_close(), "{context}: {comparison}");
}

/// Returns the deviation of `got` from `exact` over all elements, and the index of the element with the largest error. Equal
/// elements have an error of 0, even if they are infinite.
fn deviation(got: &[f64], exact: &[f64]) -> (Deviation, usize) {
    let differences: Vec<f64> = got
        .iter()
        .zip(exact)
        .map(|(got, exact)| match got == exact {
            true => 0.0,
            false => (got - exact).abs(),
        })
        .collect();
    let (at, worst) = differences
        .iter()
        .copied()
        .enumerate()
        .fold((0, 0.0), |worst, next| match next.1 > worst.1 {
            true => next,
            false => worst,
        });
    let mean = rms(&differences);
    (Deviation { mean, worst }, at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(values: &[f64]) -> Named {
        Named {
            name: "result",
            values: values.to_vec(),
            magnitude: 0.0,
            stored: 0.0,
        }
    }

    fn is_close(got: &[f64], exact: &[f64], baseline: &[f64]) -> bool {
        let precision = Precision {
            dtype: DType::F32,
            terms: 1,
        };
        Comparison::new(&named(got), &named(exact), &named(baseline), precision).is_close()
    }

    #[test]
    fn is_close_up_to_twice_the_baseline_only() {
        let (exact, baseline) = ([1.0, -1.0], [1.01, -1.01]);
        assert!(is_close(&[1.02, -1.02], &exact, &baseline));
        assert!(!is_close(&[1.021, -1.021], &exact, &baseline));
        // The error 0.025 of the first element exceeds the limit for the worst element. The root mean square of both errors
        // stays within its limit.
        assert!(!is_close(&[1.025, -1.0], &exact, &baseline));
    }

    #[test]
    fn is_close_with_exact_baseline_allows_rounding() {
        let exact = [1.0, -1.0];
        assert!(is_close(&[1.0 + 2e-7, -1.0], &exact, &exact));
        assert!(!is_close(&[1.0 + 2e-6, -1.0], &exact, &exact));
    }

    #[test]
    fn is_close_of_nonfinite_values_needs_equality() {
        let (lowest, nan) = (f64::NEG_INFINITY, f64::NAN);
        assert!(is_close(&[1.0, lowest], &[1.0, lowest], &[1.0, lowest]));
        for got in [lowest, nan] {
            assert!(!is_close(&[1.0, got], &[1.0, 2.0], &[1.0, 2.0]));
            // A NaN or infinite element must be detected even if the baseline has the same value at this element.
            assert!(!is_close(&[1.0, got], &[1.0, 2.0], &[1.0, got]));
        }
        assert!(!is_close(&[1.0, 2.0], &[1.0, lowest], &[1.0, lowest]));
    }
}
