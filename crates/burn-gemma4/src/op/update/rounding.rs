//! How the model has a weight whose optimizer keeps it in f32.
//!
//! In bf16 a weight is one of its two neighbours there: of all weights that have gone some share of the way from one to the next, that
//! share is at the next. Rounded to the nearest, one that began as a number of bf16, as those of published checkpoints do, shows nothing
//! before it has gone half of the way, and at a fine-tuning's rate that is most of its steps: the model is not the one that the optimizer
//! believes in. Stochastic rounding (Gupta et al. 2015, arXiv:1502.02551) is right in the mean, too, but draws in every step, which is
//! noise from step to step. Here each weight has one draw between two neighbours, from its place and from these, so that it changes
//! when it passes that, and equal weights in f32 are equal in bf16, after a restart as well. A weight that is a number of bf16 is that.
//!
//! Eight times as many numbers are in f16: there the nearest is taken.

#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// The bits of f32 that bf16 lacks.
const LOST: u32 = 16;
/// All of these, set.
const LOST_BITS: u32 = (1 << LOST) - 1;
/// An infinity's exponent, and that of what is not a number.
const NOT_FINITE: u32 = 0x7F80_0000;
/// Of MurmurHash3 (Appleby 2011): its finalizer's factors, and one of its body's, which keeps places and numbers apart.
const FACTORS: [u32; 3] = [0x85EB_CA6B, 0xC2B2_AE35, 0xCC9E_2D51];

/// The share of the way to the next number, of 2¹⁶, beyond which the weight of a place is there. `kept` is the number that it comes from.
fn threshold(kept: u32, place: u32) -> u32 {
    let mut hash = place ^ kept.wrapping_mul(FACTORS[2]);
    hash = (hash ^ hash >> 16).wrapping_mul(FACTORS[0]);
    hash = (hash ^ hash >> 13).wrapping_mul(FACTORS[1]);
    (hash ^ hash >> 16) >> LOST
}

/// The weight of a place as a number of bf16. Places are counted modulo 2³².
pub(super) fn neighbour(weight: f32, place: u32) -> f32 {
    let bits = weight.to_bits();
    if bits & NOT_FINITE == NOT_FINITE {
        return weight;
    }
    let (kept, share) = (bits >> LOST, bits & LOST_BITS);
    let next = u32::from(share > threshold(kept, place));
    f32::from_bits((kept + next) << LOST)
}

/// [`threshold`] on the device.
#[cfg(feature = "cube")]
#[cube]
fn threshold_there(kept: u32, place: u32) -> u32 {
    let mut hash = place ^ (kept * comptime!(FACTORS[2]));
    hash = (hash ^ (hash >> 16u32)) * comptime!(FACTORS[0]);
    hash = (hash ^ (hash >> 13u32)) * comptime!(FACTORS[1]);
    (hash ^ (hash >> 16u32)) >> comptime!(LOST)
}

/// [`neighbour`] on the device.
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
    fn numbers_of_bf16_stay() {
        for bits in 0..=u32::from(u16::MAX) {
            let weight = f32::from_bits(bits << 16);
            for place in [0, 1, 77, u32::MAX] {
                let shown = neighbour(weight, place);
                assert_eq!(shown.to_bits(), weight.to_bits(), "{weight}");
            }
        }
        assert!(neighbour(f32::from_bits(0x7F80_0001), 3).is_nan());
    }

    /// Of many weights at a share of the way, that share is at the next; and none goes back while its weight goes on.
    #[test]
    fn a_share_of_the_way_is_a_share_of_the_weights() {
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
                    assert!(shown == to || !*there, "{place} went back");
                    *there = shown == to;
                }
                let share = there.iter().filter(|there| **there).count() as f64;
                let share = share / f64::from(WEIGHTS);
                let expected = f64::from(sixteenth) / 16.0;
                // Four standard deviations of so many draws.
                assert!((share - expected).abs() < 0.016, "{from}: {share}");
            }
        }
    }
}
