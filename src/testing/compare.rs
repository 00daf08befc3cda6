//! Closeness to the oracle, in units of what the dtype can do.
//!
//! A result may err twice as much as the same mathematics in the same dtype does (the reference), in root mean square and at the worst element, plus a floor that only rounding explains:
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

use super::dense::rms;
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
    /// What it is.
    pub name: &'static str,
    /// Its elements.
    pub values: Vec<f64>,
    /// The size of the terms that cancel in it; 0 where none do.
    pub magnitude: f64,
    /// The size of those among them that the stored output enters.
    pub stored: f64,
}

/// How far a result is from the oracle, and how far it may be; see the module.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The result's name.
    pub name: &'static str,
    /// Of the oracle's finite elements, in root mean square.
    pub size: f64,
    /// Of the result.
    pub error: Deviation,
    /// Of the same mathematics in the same dtype.
    pub baseline: Deviation,
    /// What the result's may be.
    pub allowed: Deviation,
    /// Where the largest error is, with the values found and expected there.
    pub worst: (usize, f64, f64),
    /// The first element that is infinite or NaN and should not be, or the other way round, with the values found and
    /// expected there.
    pub misplaced: Option<(usize, f64, f64)>,
}

/// A size of an error.
#[derive(Clone, Copy, Debug)]
pub struct Deviation {
    /// The root mean square.
    pub mean: f64,
    /// Of the worst element.
    pub worst: f64,
}

impl Comparison {
    /// Compares `got` with `exact`; `baseline` and the dtype say how close it should be.
    ///
    /// # Panics
    /// Where the results differ in size.
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
        // A baseline that is not finite explains nothing.
        let explained = |error: f64| if error.is_finite() { 2.0 * error } else { 0.0 };

        let compute = 4.0 * precision.compute();
        let sums = compute * (precision.terms as f64).sqrt();
        let cancelled = compute * exact.magnitude + precision.storage() / 2.0 * exact.stored;
        // The worst of many normally distributed errors is a few times their size, and more where few rows
        // have all there is.
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

    /// Whether the result is as close as it should be.
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
            return write!(f, "{name}[{index}] is {got}, and it should be {exact}");
        }
        let (index, got, exact) = self.worst;
        write!(
            f,
            "{name} errs by {:.2e} (allowed {:.2e}, the same mathematics {:.2e}) of {size:.2e} in root mean square, \
             and at most by {:.2e} (allowed {:.2e}, the same mathematics {:.2e}) at [{index}]: {got} instead of {exact}",
            error.mean, allowed.mean, baseline.mean, error.worst, allowed.worst, baseline.worst,
        )
    }
}

/// Asserts that `got` is as close to `exact` as `baseline` and the dtype allow; see the module.
///
/// # Panics
/// Where it is not, with `context` and what differs.
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

/// The error over the finite elements, and where it is largest.
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
    fn twice_the_baseline_is_close_and_more_is_not() {
        let (exact, baseline) = ([1.0, -1.0], [1.01, -1.01]);
        assert!(is_close(&[1.02, -1.02], &exact, &baseline));
        assert!(!is_close(&[1.021, -1.021], &exact, &baseline));
        // On average, it would be.
        assert!(!is_close(&[1.025, -1.0], &exact, &baseline));
    }

    #[test]
    fn rounding_is_allowed_where_the_baseline_is_exact() {
        let exact = [1.0, -1.0];
        assert!(is_close(&[1.0 + 2e-7, -1.0], &exact, &exact));
        assert!(!is_close(&[1.0 + 2e-6, -1.0], &exact, &exact));
    }

    #[test]
    fn what_is_not_finite_has_to_be_equal() {
        let (lowest, nan) = (f64::NEG_INFINITY, f64::NAN);
        assert!(is_close(&[1.0, lowest], &[1.0, lowest], &[1.0, lowest]));
        for got in [lowest, nan] {
            assert!(!is_close(&[1.0, got], &[1.0, 2.0], &[1.0, 2.0]));
            // A baseline that fails as well is no excuse.
            assert!(!is_close(&[1.0, got], &[1.0, 2.0], &[1.0, got]));
        }
        assert!(!is_close(&[1.0, 2.0], &[1.0, lowest], &[1.0, lowest]));
    }
}
