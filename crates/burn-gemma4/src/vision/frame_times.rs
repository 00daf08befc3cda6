//! The times at which the frames of an animation begin.

/// Delays up to this number of milliseconds count as [`SHORT_DELAY_MS`], as in browsers. Many GIF files have no delays.
const LONGEST_SHORT_DELAY_MS: u128 = 10;

/// The delay in milliseconds that browsers give to frames with too short a delay.
const SHORT_DELAY_MS: u32 = 100;

/// The time for which a frame is shown, as a fraction of a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Delay {
    pub numerator: u32,
    pub denominator: u32,
}

/// Returns the second at which each frame begins, rounded down. Sums are exact, so that 30 frames of 1/30 second take
/// one second.
pub(super) fn seconds(delays: &[Delay]) -> Result<Vec<u64>, String> {
    let mut start = (0, 1);
    let mut seconds = Vec::with_capacity(delays.len());
    for delay in delays {
        let (numerator, denominator) = start;
        seconds.push((numerator / denominator) as u64);
        start = sum(start, effective(*delay))
            .ok_or("has delays of frames with too many different denominators")?;
    }
    Ok(seconds)
}

/// Replaces a delay that is too short by the one of browsers.
fn effective(delay: Delay) -> (u128, u128) {
    let (numerator, denominator) = (u128::from(delay.numerator), u128::from(delay.denominator));
    match 1000 * numerator <= LONGEST_SHORT_DELAY_MS * denominator {
        true => (u128::from(SHORT_DELAY_MS), 1000),
        false => (numerator, denominator),
    }
}

/// Adds two fractions, and reduces the sum. Returns `None` if a number becomes too large.
fn sum((one, below): (u128, u128), (other, below_other): (u128, u128)) -> Option<(u128, u128)> {
    let numerator = one
        .checked_mul(below_other)?
        .checked_add(other.checked_mul(below)?)?;
    let denominator = below.checked_mul(below_other)?;
    let (mut divisor, mut rest) = (numerator, denominator);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    Some((numerator / divisor, denominator / divisor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_of_delays_are_exact() {
        let delays = |numerator, denominator| {
            vec![
                Delay {
                    numerator,
                    denominator,
                };
                61
            ]
        };
        let at = |delays: &[Delay]| {
            let seconds = seconds(delays).expect("the sums are small");
            [seconds[29], seconds[30], seconds[60]]
        };
        assert_eq!(at(&delays(1, 30)), [0, 1, 2]);
        // The delay of 10 ms becomes 100 ms, and the delay of 11 ms stays.
        assert_eq!(at(&delays(1, 100)), [2, 3, 6]);
        assert_eq!(at(&delays(11, 1000)), [0, 0, 0]);
        let primes = (1000..3000).map(|denominator| Delay {
            numerator: 999,
            denominator,
        });
        let reason = seconds(&primes.collect::<Vec<_>>()).expect_err("the sums are too exact");
        assert!(reason.contains("denominators"), "{reason}");
    }
}
