//! The softmax and the GEMM P·V of a block, for the split-M and split-N kernels. In these kernels, the warp that
//! computes a row's scores computes them for all keys of the block.

use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::bias::BiasWords;
use crate::engine::tensor_core::common::block_mask::{BlockMask, block_mask};
use crate::engine::tensor_core::common::block_range::TilePosition;
use crate::engine::tensor_core::common::dropout::{draw_step, packed_step};
use crate::engine::tensor_core::common::score::score;
use crate::engine::tensor_core::common::scoring::{Masking, Scoring};
use crate::engine::tensor_core::common::softmax::{
    SoftmaxState, empty_state, exp_scores, rescaled, softmax_state, thread_row_max,
};
use crate::engine::tensor_core::common::tile_scheduler::{Tile, TileKind, row_pair};
use crate::engine::tensor_core::mma::fragments::{fragment_of, used_by_warp};
use crate::engine::tensor_core::mma::plan::warp::WarpTiles;
use crate::types::quantized::CodeFormat;
use cube_kit::ampere::FRAGMENT_ROWS;
use cube_kit::ampere::code_operand::{Codes, add_word_product};
use cube_kit::ampere::mma::{Scores, Sums, add_product};
use cube_kit::nvidia::accumulator::{is_second, pair};
use cubecl::prelude::*;

/// The tile rows that the thread holds in each of its warp's two 16-row fragments. If the warp has one fragment, the
/// kernel does not use `second`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WarpRows {
    pub first: RowPair,
    pub second: RowPair,
}

/// Returns the tile rows that the thread holds in its warp's fragments. `row` is the first of these rows.
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

/// The masks of a block for the rows of a warp's two fragments.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WarpViews {
    pub first: BlockMask,
    pub second: BlockMask,
}

/// Loads the masks of a block for the rows of a warp's fragments. If the call comes before the GEMM Q·Kᵀ, the GEMM
/// hides the latency of the loads.
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
    let first = block_mask(
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
        block_mask(
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

/// The online softmax states of a warp's two fragments.
#[derive(CubeType, CubeTypeMut, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WarpStates {
    pub first: SoftmaxState,
    pub second: SoftmaxState,
}

/// The online softmax states of a warp's rows before the first block.
#[cube]
pub(crate) fn empty_states(negative_infinity: f32) -> WarpStates {
    WarpStates {
        first: empty_state(negative_infinity),
        second: empty_state(negative_infinity),
    }
}

/// The result of a warp's main loop: its output before the division by the row sums, and the online softmax states of its
/// rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct MainloopOutput<AO: Size> {
    pub o: Vector<f32, AO>,
    pub states: WarpStates,
}

/// P of a block as the left operand of the GEMM P·V, and the softmax states after the block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct PFragments<AP: Size> {
    pub p: Vector<u32, AP>,
    pub states: WarpStates,
}

/// The scales of a lane's score columns. A lane holds two of every 8 columns. The largest block has 32 keys, so 8
/// scales suffice.
pub(crate) type ColumnScales = Vector<f32, Const<8>>;

/// Computes P from the dot products `q·k` of a block. If V is quantized, the function multiplies each probability by
/// the scale of the matching row of V. It then rounds the product to half precision.
#[cube]
pub(crate) fn weights<F: Float, NB: Size, NS: Size, NP: Size, AS: Size, AP: Size>(
    s: Vector<f32, AS>,
    value_scales: ColumnScales,
    before: WarpStates,
    block: i32,
    seen: &WarpViews,
    rows: &WarpRows,
    scoring: &Scoring<F, NB>,
    scale_log2: f32,
    #[comptime] warp: WarpTiles,
    #[comptime] kind: TileKind,
) -> PFragments<AP> {
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
        let own_seen: BlockMask = if comptime!(fragment == 0) {
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
            scale_log2,
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
    PFragments::<AP> { p, states }
}

/// P of one fragment and block, and the softmax state after the block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct FragmentWeights<NP: Size> {
    p: Vector<u32, NP>,
    state: SoftmaxState,
}

/// Computes P of one fragment from the fragment's dot products `q·k`.
#[cube]
fn fragment_weights<F: Float, NB: Size, NS: Size, NP: Size>(
    s: Vector<f32, NS>,
    value_scales: ColumnScales,
    before: SoftmaxState,
    block: i32,
    seen: &BlockMask,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    scale_log2: f32,
    #[comptime] warp: WarpTiles,
    #[comptime] kind: TileKind,
) -> FragmentWeights<NP> {
    let first_column = block * comptime!(warp.keys as i32);
    let s = score::<F, NB, NS>(
        s,
        first_column,
        seen,
        rows,
        BiasWords::zeroed(),
        scoring,
        warp.keys,
        kind.fragment,
    );
    let largest = thread_row_max::<NS>(s, before.row_max.reference, warp.keys);
    let made = rescaled::<NS>(
        s,
        largest,
        before.row_max,
        scale_log2,
        scoring.arguments.negative_infinity,
        false,
        warp.keys,
    );
    let mut sum_0 = f32::new(0.0);
    let mut sum_1 = f32::new(0.0);
    let mut p = Vector::<u32, NP>::zeroed();
    #[unroll]
    for step in 0..comptime!(warp.keys / 16) {
        let part = exp_scores::<NS>(made.s, made.row_max.shift, scale_log2, step, false);
        let mut values = part.values;
        if comptime!(warp.codes.is_some()) {
            #[unroll]
            for i in 0..8usize {
                let column = comptime!(4 * step + i / 4 * 2 + i % 2);
                let scale = value_scales.extract(column);
                values.insert(i, times_scale(values.extract(i), scale));
            }
        }
        let words = draw_step::<F, NB>(
            scoring,
            rows,
            first_column + comptime!(16 * step as i32),
            comptime!(kind.heads == 1),
        );
        let packed = packed_step::<F, NB>(
            values,
            words,
            scoring,
            comptime!(kind.heads == 1),
            warp.half,
        );
        #[unroll]
        for i in 0..4usize {
            p.insert(comptime!(4 * step + i), packed.extract(i));
        }
        sum_0 += part.sums.first;
        sum_1 += part.sums.second;
    }
    FragmentWeights::<NP> {
        p,
        state: softmax_state::<NS>(made, before.sums, pair(sum_0, sum_1)),
    }
}

/// Multiplies a probability by the scale of the matching row of V. A probability of 0 stays 0, even if the scale is
/// NaN, as it may be for a masked row.
#[cube]
fn times_scale(probability: f32, scale: f32) -> f32 {
    select(probability == 0.0f32, 0.0f32, probability * scale)
}

/// Multiplies O by the rescale factors, if the current block changed the row maxima that the softmax subtracts.
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

/// Multiplies P by a block of V, and adds the product to O. Rows of V that are hidden from all rows of the tile may be
/// NaN, so the GEMM reads these rows of V as zeros. If V is quantized, the GEMM reads all rows as they are, because
/// codes are never NaN.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is decided at compile time, the inner one at run time"
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
    if comptime!(warp.codes.is_some()) {
        add_word_product::<AO, AP>(o, p, values, product, comptime!(operand_codes(warp)))
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

/// The sizes of the GEMM Q·Kᵀ. In shared memory, the queries lie in subtiles (64 columns each) of `left_rows` rows.
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

/// The format of the codes of K and V, which must be quantized.
pub(crate) const fn operand_codes(warp: WarpTiles) -> Codes {
    match warp.codes {
        Some(CodeFormat::E4m3) => Codes::E4m3,
        Some(CodeFormat::Int8) | None => Codes::Int8,
    }
}

/// The sizes of the GEMM P·V, which adds to O.
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
