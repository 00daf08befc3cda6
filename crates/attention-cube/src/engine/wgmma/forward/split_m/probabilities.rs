//! A block's numerators, and P as an operand.

use crate::engine::wgmma::plan::SplitMTiles;
use crate::fragment::softmax::{SoftmaxState, numerators, own_maxima, rescaled, softmax_state};
use cube_kit::hopper::accumulator::pair;
use cube_kit::hopper::ptx::pack;
use cubecl::prelude::*;

/// The numerators of a block, and how far the rows are with it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Step<NS: Size> {
    pub numerators: Vector<f32, NS>,
    pub softmax_state: SoftmaxState,
}

/// Makes a block's numerators of its scores.
#[cube]
pub(super) fn softmax<NS: Size>(
    s: Vector<f32, NS>,
    before: SoftmaxState,
    power: f32,
    negative_infinity: f32,
    #[comptime] tiles: SplitMTiles,
) -> Step<NS> {
    let largest = own_maxima::<NS>(s, before.row_max.reference, tiles.keys);
    let made = rescaled::<NS>(
        s,
        largest,
        before.row_max,
        power,
        negative_infinity,
        false,
        tiles.keys,
    );
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut values = Vector::<f32, NS>::zeroed();
    #[unroll]
    for step in 0..comptime!(tiles.keys / 16) {
        let part = numerators::<NS>(made.s, made.row_max.shift, power, step, false);
        #[unroll]
        for i in 0..8usize {
            values.insert(comptime!(8 * step + i), part.values.extract(i));
        }
        sum_0 += part.sums.first;
        sum_1 += part.sums.second;
    }
    Step::<NS> {
        numerators: values,
        softmax_state: softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1)),
    }
}

/// P as the left operand of a product.
#[cube]
pub(super) fn packed<NS: Size, NP: Size>(
    numerators: Vector<f32, NS>,
    #[comptime] tiles: SplitMTiles,
) -> Vector<u32, NP> {
    let mut p = Vector::<u32, NP>::zeroed();
    #[unroll]
    for pair in 0..comptime!(tiles.keys / 4) {
        let first = numerators.extract(comptime!(2 * pair));
        let second = numerators.extract(comptime!(2 * pair + 1));
        p.insert(pair, pack(first, second, tiles.half));
    }
    p
}
