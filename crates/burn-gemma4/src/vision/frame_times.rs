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

/// The largest denominator of a sum that is exact. A product with the denominator of a delay, 32 bits, then has at most
/// 96 bits, and a product with nanoseconds 126 bits.
const LARGEST_DENOMINATOR: u128 = 1 << 64;

/// The number of parts of a second to which sums with larger denominators are rounded.
const NANOSECONDS: u128 = 1_000_000_000;

/// Returns the second at which each frame begins, rounded down. Sums are exact, so that 30 frames of 1/30 second take
/// one second. With many different denominators, sums are rounded to nanoseconds.
pub(super) fn seconds(delays: &[Delay]) -> Vec<u64> {
    let mut start = Time {
        seconds: 0,
        numerator: 0,
        denominator: 1,
    };
    let mut seconds = Vec::with_capacity(delays.len());
    for delay in delays {
        seconds.push(start.seconds);
        start = start.after(effective(*delay));
    }
    seconds
}

/// A time: whole seconds, and a fraction of a second below 1.
#[derive(Clone, Copy)]
struct Time {
    seconds: u64,
    numerator: u128,
    denominator: u128,
}

impl Time {
    /// Returns the time after a delay.
    fn after(self, (numerator, denominator): (u128, u128)) -> Self {
        let mut sum = (
            self.numerator * denominator + (numerator % denominator) * self.denominator,
            self.denominator * denominator,
        );
        let divisor = greatest_common_divisor(sum.0, sum.1);
        sum = (sum.0 / divisor, sum.1 / divisor);
        if sum.1 > LARGEST_DENOMINATOR {
            // The sum is below 2.
            let whole = sum.0 / sum.1;
            let rest = (sum.0 % sum.1 * NANOSECONDS + sum.1 / 2) / sum.1;
            sum = (whole * NANOSECONDS + rest, NANOSECONDS);
        }
        let whole = numerator / denominator + sum.0 / sum.1;
        Self {
            seconds: self.seconds + whole as u64,
            numerator: sum.0 % sum.1,
            denominator: sum.1,
        }
    }
}

fn greatest_common_divisor(one: u128, other: u128) -> u128 {
    let (mut divisor, mut rest) = (one, other);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    divisor
}

/// Replaces a delay that is too short by the one of browsers.
fn effective(delay: Delay) -> (u128, u128) {
    let (numerator, denominator) = (u128::from(delay.numerator), u128::from(delay.denominator));
    match 1000 * numerator <= LONGEST_SHORT_DELAY_MS * denominator {
        true => (u128::from(SHORT_DELAY_MS), 1000),
        false => (numerator, denominator),
    }
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
            let seconds = seconds(delays);
            [seconds[29], seconds[30], seconds[60]]
        };
        assert_eq!(at(&delays(1, 30)), [0, 1, 2]);
        // The delay of 10 ms becomes 100 ms, and the delay of 11 ms stays.
        assert_eq!(at(&delays(1, 100)), [2, 3, 6]);
        assert_eq!(at(&delays(11, 1000)), [0, 0, 0]);
    }

    /// Denominators of 16 bits, as PNG files have them. The fractions are close to 1/30 second.
    #[test]
    fn seconds_of_delays_with_many_denominators_are_rounded_to_nanoseconds() {
        let delays: Vec<Delay> = (0..60_000u32)
            .map(|index| Delay {
                numerator: 100 + index % 1900,
                denominator: 3001 + index % 57_000,
            })
            .collect();
        let mut time = 0.0;
        for (delay, second) in delays.iter().zip(seconds(&delays)) {
            // A sum of floats may be on the other side of a whole second.
            let fraction = f64::fract(time);
            if (1e-3..0.999).contains(&fraction) {
                assert_eq!(second, time as u64, "{time}");
            }
            let (numerator, denominator) = effective(*delay);
            time += numerator as f64 / denominator as f64;
        }
        let longest = Delay {
            numerator: u32::MAX,
            denominator: 1,
        };
        let largest = u64::from(u32::MAX);
        assert_eq!(seconds(&[longest; 3]), [0, largest, 2 * largest]);
    }
}
