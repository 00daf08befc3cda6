//! Cross entropy of a row of logits, and its gradient in place.
//!
//! Algorithm: the loss is the LSE of the logits minus the target's logit. An online softmax computes the LSE (Milakov and
//! Gimelshein 2018, arXiv:1805.02867). A second pass overwrites the logits with the gradient.
//!
//! Budget: shared memory holds one float for each plane of the cube. Registers hold two vectors per unit. Schedule: a cube
//! reads a row twice, and writes the row once. Bound: memory bandwidth. The tanh and the exponentials take about as long as
//! the memory accesses.

use crate::op::sums::{Team, cube_max, cube_sum};
use cubecl::prelude::*;

/// The compile-time options of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub is_capped: bool,
    /// True if the gradient overwrites the logits. Otherwise the logits stay unchanged.
    pub with_gradient: bool,
    pub team: Team,
}

/// Returns `tanh(logits / cap)`, whose magnitude is at most 1.
#[cube]
fn bounded<N: Size>(logits: Vector<f32, N>, cap: f32) -> Vector<f32, N> {
    let mut ratios = logits / Vector::cast_from(cap);
    // Clamp the argument of tanh to ±15, because drivers may compute tanh through exponentials that overflow. NaN fails
    // both comparisons, and stays NaN.
    #[unroll]
    for lane in 0..ratios.vector_size().comptime() {
        let ratio = ratios.extract(lane);
        let below = select(ratio < -15.0f32, -15.0f32, ratio);
        ratios.insert(lane, select(ratio > 15.0f32, 15.0f32, below));
    }
    ratios.tanh()
}

#[cube]
fn capped<N: Size>(
    logits: Vector<f32, N>,
    cap: f32,
    #[comptime] is_capped: bool,
) -> Vector<f32, N> {
    if comptime!(is_capped) {
        bounded(logits, cap) * Vector::cast_from(cap)
    } else {
        logits
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn cross_entropy<E: Float, I: Int, N: Size>(
    logits: &mut Tensor<Vector<E, N>>,
    targets: &Tensor<I>,
    losses: &mut Tensor<f32>,
    rows: u32,
    vectors: u32,
    cap: f32,
    #[comptime] kind: Kind,
    #[define(E)] _element: ElemType,
    #[define(I)] _integer: ElemType,
    #[define(N)] _vector: usize,
) {
    if CUBE_POS >= rows as usize {
        terminate!();
    }
    let team = comptime!(kind.team);
    let units = comptime!(team.units as u32);
    let lanes = logits.vector_size().comptime();
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let first = CUBE_POS * vectors as usize;

    let mut largest = f32::new(f32::MIN);
    let mut sum = 0.0f32;
    let mut place = UNIT_POS;
    while place < vectors {
        let read = Vector::<f32, N>::cast_from(logits[first + place as usize]);
        let values = capped(read, cap, comptime!(kind.is_capped));
        let mut new = largest;
        #[unroll]
        for lane in 0..lanes {
            new = max(new, values.extract(lane));
        }
        let weights = (values - Vector::cast_from(new)).exp();
        sum *= (largest - new).exp();
        #[unroll]
        for lane in 0..lanes {
            sum += weights.extract(lane);
        }
        largest = new;
        place += units;
    }
    let of_row = cube_max(largest, &mut partial, team);
    let sum = cube_sum(sum * (largest - of_row).exp(), &mut partial, team);
    let logarithm = of_row + sum.ln();

    // Ignore a row whose target is negative: its loss and gradient are zero.
    let target = i32::cast_from(targets[CUBE_POS]);
    let counts = target >= 0;
    let column = select(counts, target, 0) as u32;
    let vector_of_target = column / comptime!(lanes as u32);
    let lane_of_target = column % comptime!(lanes as u32);
    // Write the largest f32 as the loss if the target is outside the vocabulary, because WGSL has no NaN.
    if vector_of_target >= vectors && UNIT_POS == 0 {
        losses[CUBE_POS] = f32::new(f32::MAX);
    }

    let mut place = UNIT_POS;
    while place < vectors {
        let is_here = place == vector_of_target;
        if comptime!(kind.with_gradient) || is_here {
            let at = first + place as usize;
            let read = Vector::<f32, N>::cast_from(logits[at]);
            let values = capped(read, cap, comptime!(kind.is_capped));
            if is_here {
                let mut of_target = 0.0f32;
                #[unroll]
                for lane in 0..lanes {
                    if lane_of_target == comptime!(lane as u32) {
                        of_target = values.extract(lane);
                    }
                }
                losses[CUBE_POS] = select(counts, logarithm - of_target, 0.0f32);
            }
            if comptime!(kind.with_gradient) {
                let mut gradient = (values - Vector::cast_from(logarithm)).exp();
                if is_here {
                    #[unroll]
                    for lane in 0..lanes {
                        if lane_of_target == comptime!(lane as u32) {
                            gradient.insert(lane, gradient.extract(lane) - 1.0f32);
                        }
                    }
                }
                if comptime!(kind.is_capped) {
                    let bounded = values / Vector::cast_from(cap);
                    gradient *= Vector::cast_from(1.0f32) - bounded * bounded;
                }
                if !counts {
                    gradient = Vector::<f32, N>::zeroed();
                }
                logits[at] = Vector::cast_from(gradient);
            }
        }
        place += units;
    }
}
