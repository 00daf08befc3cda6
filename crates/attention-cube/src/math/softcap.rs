//! `c · tanh(x / c)` where the cap is far above most scores: what kernels and the reference share of it.
//!
//! A hyperbolic tangent by exponentials errs by some units in the last place of 1, and so its multiple by as many of the
//! cap. Of a cap among the scores no softmax tells that from the exact one. Above [`WIDE`] it would: at 300 it shows in
//! f32, at 10⁶ it is 0.2, and from 10⁸ on nothing is left of the scores. There an odd polynomial takes the tangent's place for
//! ratios below [`NEAR`], as a correction of the score itself, so that a cap that no score comes near, up to f32's largest
//! number, changes nothing.

/// Softcaps above this are wide. Up to here the error is within 8·10⁻⁶, the last place of a score so large.
pub(crate) const WIDE: f64 = 64.0;

/// Ratios of score and cap below this are near zero.
pub(crate) const NEAR: f32 = 0.625;

/// `tanh(r) / r − 1` by powers of `r²` from the first on, for ratios near zero (Cephes' `tanhf`): within an ulp of f32.
pub(crate) const SERIES: [f32; 5] = [
    -3.333_328e-1,
    1.333_144_2e-1,
    -5.373_971_5e-2,
    2.063_909e-2,
    -5.704_987e-3,
];

/// Whether a softcap is wide.
pub(crate) fn is_wide(softcap: Option<f64>) -> bool {
    softcap.is_some_and(|softcap| softcap > WIDE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The series and the tangent meet within a few ulps of f32.
    #[test]
    fn the_series_is_the_tangent_near_zero() {
        for step in 1..=1000 {
            let ratio = NEAR * step as f32 / 1000.0;
            let squared = ratio * ratio;
            let series = SERIES
                .into_iter()
                .rev()
                .fold(0.0f32, |sum, term| sum.mul_add(squared, term));
            let found = f64::from((ratio * squared).mul_add(series, ratio));
            let exact = f64::from(ratio).tanh();
            assert!(
                (found / exact - 1.0).abs() < 1.5 * f64::from(f32::EPSILON),
                "{ratio}: {found} instead of {exact}"
            );
        }
    }
}
