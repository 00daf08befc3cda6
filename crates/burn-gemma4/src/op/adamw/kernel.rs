//! Kernels of an optimizer step on one parameter: the sum of squares for the gradient norm, and AdamW.
//!
//! Budget: registers hold one vector of each tensor. Shared memory holds one float for each plane of the cube.
//!
//! Bound: memory bandwidth. With half-precision weights and f32 gradients AdamW moves 30 bytes per weight.

use super::rounding::neighbour_there;
use crate::op::sums::{Team, cube_sum, sum_of_squares};
use cubecl::prelude::*;

/// The number of gradients that one launch squares and adds up. One launch per gradient would be slow, because a model has
/// hundreds of parameters. Six gradients and the other arguments need 8 buffers, which every WebGPU device can bind.
pub(super) const AT_ONCE: usize = 6;

/// The number of vectors in each of the six gradient arguments of a launch. The number is 0 for an argument that the launch
/// does not use.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct Counts {
    pub first: u32,
    pub second: u32,
    pub third: u32,
    pub fourth: u32,
    pub fifth: u32,
    pub sixth: u32,
}

/// Returns the sum of squares of the gradient elements that this unit reads.
#[cube]
fn squares<E: Float, N: Size>(
    gradient: &Tensor<Vector<E, N>>,
    vectors: u32,
    #[comptime] units: usize,
) -> f32 {
    let mut squares = 0.0f32;
    let stride = CUBE_COUNT * units;
    let mut vector = CUBE_POS * units + UNIT_POS as usize;
    while vector < vectors as usize {
        squares += sum_of_squares(gradient[vector]);
        vector += stride;
    }
    squares
}

/// Adds up the squares of up to six gradients. Each cube sums the squares of some vectors, and adds its result to its own
/// element of `sums`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn add_squares<E: Float, N: Size>(
    first: &Tensor<Vector<E, N>>,
    second: &Tensor<Vector<E, N>>,
    third: &Tensor<Vector<E, N>>,
    fourth: &Tensor<Vector<E, N>>,
    fifth: &Tensor<Vector<E, N>>,
    sixth: &Tensor<Vector<E, N>>,
    sums: &mut Tensor<f32>,
    counts: Counts,
    #[comptime] team: Team,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let units = comptime!(team.units);
    let mut partial = Shared::<[f32]>::new_slice(comptime!(team.parts()));
    let mut sum = squares(first, counts.first, units);
    sum += squares(second, counts.second, units);
    sum += squares(third, counts.third, units);
    sum += squares(fourth, counts.fourth, units);
    sum += squares(fifth, counts.fifth, units);
    sum += squares(sixth, counts.sixth, units);
    let sum = cube_sum(sum, &mut partial, team);
    if UNIT_POS == 0 {
        sums[CUBE_POS] += sum;
    }
}

/// The scalar coefficients of a step, in f32.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct Coefficients {
    /// AdamW's betas β₁ and β₂: the coefficients of the previous running means.
    pub kept_mean: f32,
    pub kept_square: f32,
    /// The coefficients of the gradient and its square in the running means: 1 minus the betas.
    pub new_mean: f32,
    pub new_square: f32,
    /// The divisors `1 - βᵗ` of the two running means at step `t`, for AdamW's bias correction.
    pub of_mean: f32,
    pub of_square: f32,
    pub epsilon: f32,
    /// The factor of a weight in weight decay: 1 minus the learning rate times λ.
    pub kept_weight: f32,
    pub rate: f32,
}

/// Updates a vector of weights and its running means by an AdamW step, with Burn's order of operations. The gradient is
/// multiplied by `factor[0]`. If `factor[0]` is 0, the function changes nothing. A multiplication by 0 would not be enough,
/// because 0 × NaN is NaN.
#[cube]
fn updated<G: Float, N: Size>(
    gradient: &Tensor<Vector<G, N>>,
    factor: &Tensor<f32>,
    weight: &mut Tensor<Vector<f32, N>>,
    mean: &mut Tensor<Vector<f32, N>>,
    square: &mut Tensor<Vector<f32, N>>,
    by: &Coefficients,
) -> Vector<f32, N> {
    let mut w = weight[ABSOLUTE_POS];
    if factor[0] != 0.0f32 {
        w = step(gradient, factor, w, mean, square, by);
        weight[ABSOLUTE_POS] = w;
    }
    w
}

/// Returns a vector of weights after an AdamW step, and updates the running means.
#[cube]
fn step<G: Float, N: Size>(
    gradient: &Tensor<Vector<G, N>>,
    factor: &Tensor<f32>,
    weight: Vector<f32, N>,
    mean: &mut Tensor<Vector<f32, N>>,
    square: &mut Tensor<Vector<f32, N>>,
    by: &Coefficients,
) -> Vector<f32, N> {
    let g = Vector::<f32, N>::cast_from(gradient[ABSOLUTE_POS]) * Vector::cast_from(factor[0]);
    let m =
        mean[ABSOLUTE_POS] * Vector::cast_from(by.kept_mean) + g * Vector::cast_from(by.new_mean);
    let v = square[ABSOLUTE_POS] * Vector::cast_from(by.kept_square)
        + g * g * Vector::cast_from(by.new_square);
    let deviation = (v / Vector::cast_from(by.of_square)).sqrt() + Vector::cast_from(by.epsilon);
    let step = m / Vector::cast_from(by.of_mean) / deviation;
    mean[ABSOLUTE_POS] = m;
    square[ABSOLUTE_POS] = v;
    weight * Vector::cast_from(by.kept_weight) - step * Vector::cast_from(by.rate)
}

/// Updates f32 weights in place by AdamW.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn adamw<G: Float, N: Size>(
    gradient: &Tensor<Vector<G, N>>,
    factor: &Tensor<f32>,
    weight: &mut Tensor<Vector<f32, N>>,
    mean: &mut Tensor<Vector<f32, N>>,
    square: &mut Tensor<Vector<f32, N>>,
    by: Coefficients,
    vectors: u32,
    #[define(G)] _gradient_element: ElemType,
    #[define(N)] _vector: usize,
) {
    if ABSOLUTE_POS < vectors as usize {
        updated(gradient, factor, weight, mean, square, &by);
    }
}

/// Rounds a vector of f32 weights to the model's dtype. If `drawn` is true, the pseudorandom thresholds of
/// [`super::rounding`] decide between the two bf16 neighbors. Otherwise rounds to nearest.
#[cube]
fn shown<W: Float, N: Size>(weights: Vector<f32, N>, #[comptime] drawn: bool) -> Vector<W, N> {
    let mut shown = weights;
    if comptime!(drawn) {
        #[unroll]
        for lane in 0..weights.vector_size().comptime() {
            let place = ABSOLUTE_POS * weights.vector_size().comptime() + lane;
            shown.insert(lane, neighbour_there(weights.extract(lane), place as u32));
        }
    }
    Vector::cast_from(shown)
}

/// Rounds f32 weights to the model's dtype.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn round<W: Float, N: Size>(
    weight: &Tensor<Vector<f32, N>>,
    rounded: &mut Tensor<Vector<W, N>>,
    vectors: u32,
    #[comptime] drawn: bool,
    #[define(W)] _weight_element: ElemType,
    #[define(N)] _vector: usize,
) {
    if ABSOLUTE_POS < vectors as usize {
        rounded[ABSOLUTE_POS] = shown(weight[ABSOLUTE_POS], drawn);
    }
}

/// Updates f32 master weights by AdamW. Then writes the model's weights, which are the rounded master weights.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn adamw_rounded<G: Float, W: Float, N: Size>(
    gradient: &Tensor<Vector<G, N>>,
    factor: &Tensor<f32>,
    weight: &mut Tensor<Vector<f32, N>>,
    mean: &mut Tensor<Vector<f32, N>>,
    square: &mut Tensor<Vector<f32, N>>,
    rounded: &mut Tensor<Vector<W, N>>,
    by: Coefficients,
    vectors: u32,
    #[comptime] drawn: bool,
    #[define(G)] _gradient_element: ElemType,
    #[define(W)] _weight_element: ElemType,
    #[define(N)] _vector: usize,
) {
    if ABSOLUTE_POS < vectors as usize {
        let weight = updated(gradient, factor, weight, mean, square, &by);
        rounded[ABSOLUTE_POS] = shown(weight, drawn);
    }
}
