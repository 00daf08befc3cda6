//! What a step does with the numbers of one parameter: their part of the norm of all gradients, and AdamW.
//!
//! Budget: a vector of each operand in registers; for the norm a float a part of the cube in shared memory. Bound by memory's rate:
//! every number is read once and written once, so that AdamW is 30 bytes a weight in half precision.

use super::rounding::neighbour_there;
use crate::op::sums::{Team, cube_sum, sum_of_squares};
use cubecl::prelude::*;

/// Gradients whose squares one launch adds up: there are hundreds, most of them small. With their sums and what CubeCL tells a kernel of its
/// tensors they are 8 buffers, which is what every device of WebGPU's binds.
pub(super) const AT_ONCE: usize = 6;

/// How many vectors each of the gradients has; none of those that are there to fill the row.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct Counts {
    pub first: u32,
    pub second: u32,
    pub third: u32,
    pub fourth: u32,
    pub fifth: u32,
    pub sixth: u32,
}

/// The squares of a cube's share of a gradient.
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

/// Each cube adds the squares of its share of all gradients to its own one of the sums.
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

/// What a step's formula has beside the tensors, all of it in f32.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
pub(super) struct Coefficients {
    /// Of the means that were: AdamW's betas.
    pub kept_mean: f32,
    pub kept_square: f32,
    /// Of the gradient and its square in the means: what is left to 1.
    pub new_mean: f32,
    pub new_square: f32,
    /// The weight that all gradients so far have in the means.
    pub of_mean: f32,
    pub of_square: f32,
    pub epsilon: f32,
    /// What the decay leaves of a weight.
    pub kept_weight: f32,
    pub rate: f32,
}

/// AdamW of one vector, by the order of Burn's operations. The gradient counts `factor[0]` times, which where nothing is clipped is 1. Where
/// that is 0, the step is left out: the gradient may be no number.
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

/// The weights after a step that is not left out.
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

/// AdamW of weights in f32, in their place.
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

/// A vector of weights as the model has them, which is by [`super::rounding`] where `drawn`, else the nearest numbers.
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

/// Weights in f32 as the model has them.
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

/// AdamW of the weights in f32 behind those of a model, which are these, rounded.
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
