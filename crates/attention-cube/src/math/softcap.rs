//! Constants of the softcap `c · tanh(x / c)`, used for a cap `c` far above most scores. Kernels and the reference
//! implementation share these constants.
//!
//! A tanh that is computed from exponentials has an error of some f32 ulps of the number 1. The softcapped score
//! therefore has an error of some ulps of the number `c`. For a cap above [`WIDE`], this error changes the softmax. For
//! a cap of 10⁶, the error of the score is 0.2. For caps of 10⁸ and more, the error is larger than most scores.
//!
//! For wide caps and ratios `x / c` below [`NEAR`], kernels therefore do not use the tanh. The kernels add a correction
//! to the score. The correction is an odd polynomial of the score.

/// The largest softcap that is not wide. At this cap, the computed score differs from the exact softcapped score by at
/// most 8·10⁻⁶, one ulp of the softcap.
pub(crate) const WIDE: f64 = 64.0;

/// The ratio of score to softcap below which a polynomial replaces the tanh.
pub(crate) const NEAR: f32 = 0.625;

/// The coefficients of `tanh(r) / r − 1` in powers of `r²`, starting with the first power (Cephes' `tanhf`). For ratios
/// `r` below [`NEAR`], the error is within one f32 ulp.
pub(crate) const SERIES: [f32; 5] = [
    -3.333_328e-1,
    1.333_144_2e-1,
    -5.373_971_5e-2,
    2.063_909e-2,
    -5.704_987e-3,
];

/// True if a softcap is wide, which means above [`WIDE`].
pub(crate) fn is_wide(softcap: Option<f64>) -> bool {
    softcap.is_some_and(|softcap| softcap > WIDE)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the polynomial agrees with `tanh` within a few ulps of f32.
    #[test]
    fn series_near_zero_equals_tanh() {
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
                "tanh({ratio}) is {found}, expected {exact}"
            );
        }
    }
}
