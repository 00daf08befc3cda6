//! Rounding of f32 master weights to the model's bf16 weights.
//!
//! A bf16 weight is one of the two bf16 neighbors of its master weight. Suppose that many master weights lie between
//! the same two bf16 values, at the fraction `x` of the distance from the first to the second. About the fraction `x`
//! of these weights round to the second value. On average, the bf16 weights therefore follow the master weights.
//!
//! With rounding to nearest, a bf16 weight would change only after its master weight has moved half of the distance to the
//! next bf16 value. At the learning rate of fine-tuning, such a move takes most of the run's steps.
//!
//! Stochastic rounding (Gupta et al. 2015, arXiv:1502.02551) draws a random number in every step, which adds noise from step
//! to step. Here each weight has one fixed pseudorandom threshold between two neighbors: a hash of the weight's index and of
//! the neighbor nearer to zero. The bf16 weight changes when the master weight passes the threshold.
//!
//! f16 has eight times as many values in the same range, so a much smaller move changes an f16 weight. f16 weights
//! therefore round to nearest.

#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// The number of low bits of an f32 that a bf16 lacks.
const LOST: u32 = 16;
/// The mask of the f32 bits that a bf16 lacks.
const LOST_BITS: u32 = (1 << LOST) - 1;
/// The exponent bits of infinities and NaN.
const NOT_FINITE: u32 = 0x7F80_0000;
/// Constants of MurmurHash3 (Appleby 2011): the two multipliers of its finalizer, and one multiplier of its body. Without
/// the third constant, many pairs of weight and index would give equal hashes.
const FACTORS: [u32; 3] = [0x85EB_CA6B, 0xC2B2_AE35, 0xCC9E_2D51];

/// Returns the threshold of a weight between its two bf16 neighbors, in units of 2⁻¹⁶ of the distance between the neighbors.
/// A weight beyond the threshold rounds away from zero. `kept` holds the bits of the neighbor nearer to zero, and `place` is
/// the weight's index.
fn threshold(kept: u32, place: u32) -> u32 {
    let mut hash = place ^ kept.wrapping_mul(FACTORS[2]);
    hash = (hash ^ hash >> 16).wrapping_mul(FACTORS[0]);
    hash = (hash ^ hash >> 13).wrapping_mul(FACTORS[1]);
    (hash ^ hash >> 16) >> LOST
}

/// Returns `weight` rounded to bf16, where `place` is the weight's index modulo 2³².
pub(super) fn neighbour(weight: f32, place: u32) -> f32 {
    let bits = weight.to_bits();
    if bits & NOT_FINITE == NOT_FINITE {
        return weight;
    }
    let (kept, share) = (bits >> LOST, bits & LOST_BITS);
    let next = u32::from(share > threshold(kept, place));
    f32::from_bits((kept + next) << LOST)
}

/// Computes the same hash as the host function [`threshold`], on the device.
#[cfg(feature = "cube")]
#[cube]
fn threshold_there(kept: u32, place: u32) -> u32 {
    let mut hash = place ^ (kept * comptime!(FACTORS[2]));
    hash = (hash ^ (hash >> 16u32)) * comptime!(FACTORS[0]);
    hash = (hash ^ (hash >> 13u32)) * comptime!(FACTORS[1]);
    (hash ^ (hash >> 16u32)) >> comptime!(LOST)
}

/// Rounds as [`neighbour`] does, on the device.
#[cfg(feature = "cube")]
#[cube]
pub(super) fn neighbour_there(weight: f32, place: u32) -> f32 {
    let bits = u32::reinterpret(weight);
    let kept = bits >> comptime!(LOST);
    let share = bits & comptime!(LOST_BITS);
    let next = select(share > threshold_there(kept, place), 1u32, 0u32);
    let shown = f32::reinterpret((kept + next) << comptime!(LOST));
    let not_finite = (bits & comptime!(NOT_FINITE)) == comptime!(NOT_FINITE);
    select(not_finite, weight, shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbour_of_bf16_numbers_is_unchanged() {
        for bits in 0..=u32::from(u16::MAX) {
            let weight = f32::from_bits(bits << 16);
            for place in [0, 1, 77, u32::MAX] {
                let shown = neighbour(weight, place);
                assert_eq!(shown.to_bits(), weight.to_bits(), "{weight}");
            }
        }
        assert!(neighbour(f32::from_bits(0x7F80_0001), 3).is_nan());
    }

    /// Checks the rounding of master weights that move from one bf16 value to the next in sixteen equal steps. After `k`
    /// steps about the fraction `k / 16` of the bf16 weights must be at the next value. No bf16 weight may go back.
    #[test]
    fn neighbour_rounds_up_in_proportion_to_distance() {
        const WEIGHTS: u32 = 1 << 14;
        for from in [1.0f32, -0.0123, 3e-5, -7.5e4, 1e-40] {
            let from = f32::from_bits(from.to_bits() & !LOST_BITS);
            let to = f32::from_bits(from.to_bits() + (1 << LOST));
            let mut there = vec![false; WEIGHTS as usize];
            for sixteenth in 1..=16u32 {
                let weight = f32::from_bits(from.to_bits() + sixteenth * (1 << (LOST - 4)));
                for (place, there) in (0..).zip(&mut there) {
                    let shown = neighbour(weight, place);
                    assert!(shown == from || shown == to);
                    assert!(
                        shown == to || !*there,
                        "place {place}: the weight went back"
                    );
                    *there = shown == to;
                }
                let share = there.iter().filter(|there| **there).count() as f64;
                let share = share / f64::from(WEIGHTS);
                let expected = f64::from(sixteenth) / 16.0;
                // The bound of 0.016 is four standard deviations of the fraction of weights at the next value. One standard
                // deviation is at most 0.004.
                assert!((share - expected).abs() < 0.016, "{from}: {share}");
            }
        }
    }
}
