//! From a block's scores to P, fragment by fragment.

use crate::engine::mma::plan::split_m::SplitMTiles;
use crate::fragment::RowPair;
use crate::fragment::bias::BiasWords;
use crate::fragment::score::score;
use crate::fragment::scoring::Scoring;
use crate::fragment::softmax::{SoftmaxState, numerators, own_maxima, rescaled, softmax_state};
use crate::fragment::view::View;
use crate::fragment::work_tile::TileKind;
use cube_kit::hopper::accumulator::{is_second, pair};
use cube_kit::hopper::ptx::pack;
use cubecl::prelude::*;

/// How far the rows of a warp's two fragments are.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpStates {
    pub first: SoftmaxState,
    pub second: SoftmaxState,
}

/// A fragment's P of a block, and how far its rows are with it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Probabilities<NP: Size> {
    pub p: Vector<u32, NP>,
    pub state: SoftmaxState,
}

/// P of a fragment's dots, as the left operand of a product.
#[cube]
pub(super) fn probabilities_of<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    before: SoftmaxState,
    block: i32,
    seen: &View,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    power: f32,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) -> Probabilities<NP> {
    let s = score::<F, NB, NS>(
        s,
        block * comptime!(tiles.keys as i32),
        seen,
        rows,
        BiasWords::zeroed(),
        scoring,
        tiles.keys,
        kind.fragment,
    );
    let largest = own_maxima::<NS>(s, before.row_max.reference, tiles.keys);
    let made = rescaled::<NS>(
        s,
        largest,
        before.row_max,
        power,
        scoring.arguments.negative_infinity,
        false,
        tiles.keys,
    );
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut p = Vector::<u32, NP>::zeroed();
    #[unroll]
    for step in 0..comptime!(tiles.keys / 16) {
        let part = numerators::<NS>(made.s, made.row_max.shift, power, step, false);
        #[unroll]
        for i in 0..4usize {
            let first = part.values.extract(comptime!(2 * i));
            let second = part.values.extract(comptime!(2 * i + 1));
            p.insert(comptime!(4 * step + i), pack(first, second, tiles.half));
        }
        sum_0 += part.sums.first;
        sum_1 += part.sums.second;
    }
    Probabilities::<NP> {
        p,
        state: softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1)),
    }
}

/// O by its rows' new references, where these moved.
#[cube]
pub(super) fn rescaled_fragments<AO: Size>(
    o: Vector<f32, AO>,
    states: &WarpStates,
    #[comptime] tiles: SplitMTiles,
) -> Vector<f32, AO> {
    let mut o = o;
    let count = comptime!(tiles.vectors()[2]);
    #[unroll]
    for fragment in 0..tiles.fragments {
        let state = if comptime!(fragment == 0) {
            states.first
        } else {
            states.second
        };
        let factor = state.factor;
        if state.moved {
            #[unroll]
            for i in 0..comptime!(tiles.value_columns() / 2) {
                let register = comptime!(fragment * count + i);
                let own = if comptime!(is_second(i)) {
                    factor.second
                } else {
                    factor.first
                };
                o.insert(register, o.extract(register) * own);
            }
        }
    }
    o
}
