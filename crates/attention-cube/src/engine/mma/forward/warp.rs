//! What a warp makes of a block whose rows are its own: P of its scores, fragment by fragment, and O with the block's values.

use crate::engine::mma::fragments::{fragment_of, used_by_warp};
use crate::engine::mma::plan::warp::WarpTiles;
use crate::fragment::RowPair;
use crate::fragment::bias::BiasWords;
use crate::fragment::score::score;
use crate::fragment::scoring::{Masking, Scoring};
use crate::fragment::softmax::{
    SoftmaxState, empty_state, numerators, own_maxima, rescaled, softmax_state,
};
use crate::fragment::view::{View, view};
use crate::fragment::visits::TilePosition;
use crate::fragment::work_tile::{Tile, TileKind, row_pair};
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::product::{Scores, Sums, add_product};
use cube_kit::ampere::words::add_word_product;
use cube_kit::hopper::accumulator::{is_second, pair};
use cube_kit::hopper::ptx::pack;
use cubecl::prelude::*;

/// The rows of a warp's two fragments; where it has one, the second's are not used.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WarpRows {
    pub first: RowPair,
    pub second: RowPair,
}

/// The rows of the thread's registers, whose first is the tile's `row`-th.
#[cube]
pub(crate) fn warp_rows<F: Float, NB: Size>(
    tile: &Tile,
    scoring: &Scoring<F, NB>,
    row: i32,
    #[comptime] kind: TileKind,
) -> WarpRows {
    let next = row + comptime!(FRAGMENT_ROWS as i32);
    WarpRows {
        first: row_pair::<F, NB>(tile, scoring, row, kind),
        second: row_pair::<F, NB>(tile, scoring, next, kind),
    }
}

/// How the rows of a warp's two fragments see a block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WarpViews {
    pub first: View,
    pub second: View,
}

/// Asked for before the scores are there: the mask's words come while these are computed.
#[cube]
pub(crate) fn warp_views(
    position: &TilePosition,
    rows: &WarpRows,
    block: i32,
    masking: &Masking,
    #[comptime] warp: WarpTiles,
    #[comptime] kind: TileKind,
) -> WarpViews {
    let keys = comptime!(warp.keys);
    let first = view(
        position,
        &rows.first,
        block,
        0u32,
        masking,
        keys,
        keys,
        kind,
    );
    let second = if comptime!(warp.fragments == 2) {
        view(
            position,
            &rows.second,
            block,
            0u32,
            masking,
            keys,
            keys,
            kind,
        )
    } else {
        first
    };
    WarpViews { first, second }
}

/// How far the rows of a warp's two fragments are.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WarpStates {
    pub first: SoftmaxState,
    pub second: SoftmaxState,
}

/// Of rows that have seen nothing.
#[cube]
pub(crate) fn empty_states(negative_infinity: f32) -> WarpStates {
    WarpStates {
        first: empty_state(negative_infinity),
        second: empty_state(negative_infinity),
    }
}

/// What a warp's rows have of their blocks.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Attended<AO: Size> {
    pub o: Vector<f32, AO>,
    pub states: WarpStates,
}

/// A warp's P of a block, as the left operand of a product, and how far its rows are with it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Weights<AP: Size> {
    pub p: Vector<u32, AP>,
    pub states: WarpStates,
}

/// What a lane's columns of a block are multiplied by, two of every 8: as many as the largest block has.
pub(crate) type ColumnScales = Vector<f32, Const<8>>;

/// P of a block's dots. Where keys and values are int8, a probability is multiplied by its value's scale before it is rounded.
#[cube]
pub(crate) fn weights<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size>(
    s: Vector<f32, AS>,
    value_scales: ColumnScales,
    before: WarpStates,
    block: i32,
    seen: &WarpViews,
    rows: &WarpRows,
    scoring: &Scoring<F, NB>,
    power: f32,
    #[comptime] warp: WarpTiles,
    #[comptime] kind: TileKind,
) -> Weights<AP> {
    let mut p = Vector::<u32, AP>::zeroed();
    let mut states = before;
    #[unroll]
    for fragment in 0..warp.fragments {
        let before = if comptime!(fragment == 0) {
            before.first
        } else {
            before.second
        };
        let own_rows = if comptime!(fragment == 0) {
            rows.first
        } else {
            rows.second
        };
        let own_seen: View = if comptime!(fragment == 0) {
            seen.first
        } else {
            seen.second
        };
        let made = fragment_weights::<F, NB, NS, NP>(
            fragment_of::<AS, NS>(s, fragment),
            value_scales,
            before,
            block,
            &own_seen,
            &own_rows,
            scoring,
            power,
            warp,
            kind,
        );
        if comptime!(fragment == 0) {
            states.first = made.state;
        } else {
            states.second = made.state;
        }
        #[unroll]
        for i in 0..comptime!(warp.keys / 4) {
            p.insert(comptime!(fragment * warp.keys / 4 + i), made.p.extract(i));
        }
    }
    Weights::<AP> { p, states }
}

/// A fragment's P of a block, and how far its rows are with it.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct FragmentWeights<NP: Size> {
    p: Vector<u32, NP>,
    state: SoftmaxState,
}

/// P of a fragment's dots.
#[cube]
fn fragment_weights<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    value_scales: ColumnScales,
    before: SoftmaxState,
    block: i32,
    seen: &View,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    power: f32,
    #[comptime] warp: WarpTiles,
    #[comptime] kind: TileKind,
) -> FragmentWeights<NP> {
    let s = score::<F, NB, NS>(
        s,
        block * comptime!(warp.keys as i32),
        seen,
        rows,
        BiasWords::zeroed(),
        scoring,
        warp.keys,
        kind.fragment,
    );
    let largest = own_maxima::<NS>(s, before.row_max.reference, warp.keys);
    let made = rescaled::<NS>(
        s,
        largest,
        before.row_max,
        power,
        scoring.arguments.negative_infinity,
        false,
        warp.keys,
    );
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut p = Vector::<u32, NP>::zeroed();
    #[unroll]
    for step in 0..comptime!(warp.keys / 16) {
        let part = numerators::<NS>(made.s, made.row_max.shift, power, step, false);
        #[unroll]
        for i in 0..4usize {
            let mut first = part.values.extract(comptime!(2 * i));
            let mut second = part.values.extract(comptime!(2 * i + 1));
            if comptime!(warp.reads_words) {
                let column = comptime!(4 * step + i / 2 * 2);
                first = times_scale(first, value_scales.extract(column));
                second = times_scale(second, value_scales.extract(comptime!(column + 1)));
            }
            p.insert(comptime!(4 * step + i), pack(first, second, warp.half));
        }
        sum_0 += part.sums.first;
        sum_1 += part.sums.second;
    }
    FragmentWeights::<NP> {
        p,
        state: softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1)),
    }
}

/// A probability by its value's scale, which may be no number where nobody sees the value.
#[cube]
fn times_scale(probability: f32, scale: f32) -> f32 {
    select(probability == 0.0f32, 0.0f32, probability * scale)
}

/// O by its rows' new references, where these moved.
#[cube]
pub(crate) fn rescaled_fragments<AO: Size>(
    o: Vector<f32, AO>,
    states: &WarpStates,
    #[comptime] warp: WarpTiles,
) -> Vector<f32, AO> {
    let mut o = o;
    let count = comptime!(warp.fragment_vectors()[2]);
    #[unroll]
    for fragment in 0..warp.fragments {
        let state = if comptime!(fragment == 0) {
            states.first
        } else {
            states.second
        };
        let factor = state.factor;
        if state.moved {
            #[unroll]
            for i in 0..comptime!(warp.columns / 2) {
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

/// O with a block's values by P. Where there may be keys that nobody sees, their values are multiplied as zeros; codes are always numbers.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(crate) fn with_values<AO: Size, AP: Size>(
    o: Vector<f32, AO>,
    p: Vector<u32, AP>,
    values: u32,
    may_have_masked: bool,
    #[comptime] warp: WarpTiles,
    #[comptime] kind: TileKind,
) -> Vector<f32, AO> {
    let product = comptime!(sum_product(warp, false));
    if comptime!(warp.reads_words) {
        add_word_product::<AO, AP>(o, p, values, product)
    } else if comptime!(kind.leaves_masked()) {
        if may_have_masked {
            let used = used_by_warp::<AP>(p, warp.keys, warp.fragments);
            add_product::<AO, AP>(o, p, values, used, comptime!(sum_product(warp, true)))
        } else {
            add_product::<AO, AP>(o, p, values, 0u32, product)
        }
    } else {
        add_product::<AO, AP>(o, p, values, 0u32, product)
    }
}

/// The product that makes S, of queries in subtiles of `left_rows` rows.
pub(crate) const fn score_product(warp: WarpTiles, left_rows: usize) -> Scores {
    Scores {
        fragments: warp.fragments,
        columns: warp.keys,
        depth: warp.depth,
        left_rows,
        right_rows: warp.keys,
        half: warp.half,
    }
}

/// The product that adds to O.
const fn sum_product(warp: WarpTiles, masked: bool) -> Sums {
    Sums {
        fragments: warp.fragments,
        columns: warp.columns,
        depth: warp.keys,
        right_rows: warp.keys,
        masked,
        half: warp.half,
    }
}
