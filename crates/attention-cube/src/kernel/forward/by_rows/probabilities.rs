//! A block's numerators, and P as an operand.

use crate::kernel::forward::fragment::Pair;
use crate::kernel::forward::measure::{Measure, measured, numerators, own_maxima};
use crate::kernel::ptx::pack;
use crate::plan::wgmma::RowTiles;
use cubecl::prelude::*;

/// The numerators of a block, and what it makes of the rows' statistics.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Step<NS: Size> {
    pub numerators: Vector<f32, NS>,
    pub measure: Measure,
    pub sums: Pair,
    /// Whether older results are to be multiplied by the factors; the sums are already.
    pub moved: bool,
    pub factor: Pair,
}

/// Makes a block's numerators of its scores.
#[cube]
pub(super) fn softmax<NS: Size>(
    s: Vector<f32, NS>,
    measure: Measure,
    sums: Pair,
    power: f32,
    negative_infinity: f32,
    #[comptime] tiles: RowTiles,
) -> Step<NS> {
    let largest = own_maxima::<NS>(s, measure.reference, tiles.keys);
    let made = measured::<NS>(
        s,
        largest,
        measure,
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
        let made = numerators::<NS>(made.s, made.measure.shift, power, step, false);
        #[unroll]
        for i in 0..8usize {
            values.insert(comptime!(8 * step + i), made.values.extract(i));
        }
        sum_0 += made.sums.first;
        sum_1 += made.sums.second;
    }
    Step::<NS> {
        numerators: values,
        measure: made.measure,
        sums: Pair {
            first: sums.first * made.factor.first + sum_0,
            second: sums.second * made.factor.second + sum_1,
        },
        moved: made.moved,
        factor: made.factor,
    }
}

/// P as the left operand of a product.
#[cube]
pub(super) fn packed<NS: Size, NP: Size>(
    numerators: Vector<f32, NS>,
    #[comptime] tiles: RowTiles,
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
