//! Computes P and dS for a pair of a key tile and a query block.

use crate::auxiliary::backward_kind::BackwardKind;
use crate::auxiliary::delta::kernel::row_lse_delta_of;
use crate::math::dropout::kernel::kept_scale;
use crate::math::gradient::{RowLseDelta, score_gradient};
use crate::math::layout::Operand;
use crate::math::score::{Scoring, is_visible};
use crate::math::score_mod::ScorePlace;
use crate::math::visibility::SeqInfo;
use crate::tile_ops::product::{Stage, multiply_transposed, stage_block};
use crate::tile_ops::score_layout::{tile_column, tile_row, unit_column, unit_row};
use crate::tile_ops::tiles::UnitTiles;
use crate::tile_ops::vec4::Vec4;
use cubecl::prelude::*;

/// The indices of a pair of a key tile and a query block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Pair {
    pub batch: u32,
    /// The index of the query head.
    pub head: u32,
    pub first_key: i32,
    pub first_query: i32,
    /// True if every query of the pair sees every key of the pair.
    pub whole: bool,
}

/// The operands from which P and dS of a key tile and a query block are computed.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct PairOperands<'a, E: Float, N: Size> {
    pub query: Operand<'a, E, N>,
    pub key: Operand<'a, E, N>,
    pub value: Operand<'a, E, N>,
    pub output_gradient: Operand<'a, E, N>,
}

#[cube]
pub(super) fn pair_operands<'a, E: Float, N: Size>(
    query: Operand<'a, E, N>,
    key: Operand<'a, E, N>,
    value: Operand<'a, E, N>,
    output_gradient: Operand<'a, E, N>,
) -> PairOperands<'a, E, N> {
    PairOperands::<'a, E, N> {
        query,
        key,
        value,
        output_gradient,
    }
}

/// Processes a pair of a key tile and a query block. Writes the probabilities P to `s`, and the gradient of the dot
/// products, `d loss / d (q·k)`, to `dp`.
///
/// With matrix units, both results are later rounded to half precision. To avoid underflow in this case, the function
/// multiplies P by `p_scale`, and omits the factor `scale` (the scale of the scores) from the gradient.
#[cube]
pub(super) fn block_scores<E: Float, C: Float, M: Numeric, F: Float, N: Size>(
    operands: &PairOperands<'_, E, N>,
    rows: &Tensor<f32>,
    scoring: &Scoring<M, F>,
    seq_info: &SeqInfo,
    pair: &Pair,
    lse_delta: &mut Shared<[Vec4]>,
    stage: &mut Stage<C>,
    s: &mut Array<f32>,
    dp: &mut Array<f32>,
    #[comptime] kind: BackwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let first_key = pair.first_key;
    let first_query = pair.first_query;
    if comptime!(tiles.has_fragments()) {
        share_terms(rows, pair, scoring.seq_lens.q_len, lse_delta, tiles);
    }
    stage_block(
        &operands.query,
        &operands.output_gradient,
        first_query,
        stage,
        tiles,
    );
    multiply_transposed(
        &operands.key,
        first_key,
        &operands.query,
        first_query,
        stage,
        s,
        tiles,
        false,
        0usize,
    );
    multiply_transposed(
        &operands.value,
        first_key,
        &operands.output_gradient,
        first_query,
        stage,
        dp,
        tiles,
        false,
        1usize,
    );
    if comptime!(tiles.is_direct()) {
        block_gradients(
            rows,
            &*lse_delta,
            s,
            dp,
            pair,
            pair.whole,
            scoring,
            seq_info,
            kind,
        );
    } else if pair.whole {
        // Branch on `whole` (fully visible) once per block, so that a whole block needs no branch per score.
        block_gradients(
            rows,
            &*lse_delta,
            s,
            dp,
            pair,
            true,
            scoring,
            seq_info,
            kind,
        );
    } else {
        block_gradients(
            rows,
            &*lse_delta,
            s,
            dp,
            pair,
            false,
            scoring,
            seq_info,
            kind,
        );
    }
}

/// Copies the LSE and the delta of each query of a block to shared memory, as three lists. The references (the row
/// maxima that the softmax subtracted) come first, then the deltas, then the logarithms of the row sums. The LSE of a
/// query is its reference plus its logarithm.
///
/// The caller must sync before the call, so that no unit still reads the previous block's data. The caller must also
/// sync before other units read the new data.
#[cube]
fn share_terms(
    rows: &Tensor<f32>,
    pair: &Pair,
    q_len: i32,
    lse_delta: &mut Shared<[Vec4]>,
    #[comptime] tiles: UnitTiles,
) {
    let of_term = comptime!(tiles.columns() / 4);
    let total = comptime!(tiles.term_vectors());
    let first = pair.batch as usize * rows.stride(0) + pair.head as usize * rows.stride(1);
    #[unroll]
    for step in 0..comptime!(total.div_ceil(tiles.units)) {
        let index = UNIT_POS as usize + comptime!(step * tiles.units);
        if index < total {
            let at = first + index / of_term * rows.stride(2);
            let query = pair.first_query + (index % of_term * 4) as i32;
            let mut values = Vec4::new(0.0);
            #[unroll]
            for lane in 0..4usize {
                let query = query + lane as i32;
                let value = rows[at + select(query < q_len, query, 0i32) as usize];
                values.insert(lane, select(query < q_len, value, 0.0f32));
            }
            lse_delta[index] = values;
        }
    }
}

/// Turns S and dP into P and `d loss / d (q·k)`, see [`block_scores`]. In a `whole` pair, every query sees every key.
#[cube]
fn block_gradients<M: Numeric, F: Float>(
    rows: &Tensor<f32>,
    lse_delta: &Shared<[Vec4]>,
    s: &mut Array<f32>,
    dp: &mut Array<f32>,
    pair: &Pair,
    whole: bool,
    scoring: &Scoring<M, F>,
    seq_info: &SeqInfo,
    #[comptime] kind: BackwardKind,
) {
    let tiles = comptime!(kind.tiles);
    let unit_row = unit_row(tiles);
    let unit_column = unit_column(tiles);
    let of_term = comptime!(tiles.columns() / 4);
    #[unroll]
    for c in 0..comptime!(tiles.columns_per_unit()) {
        let column = tile_column(unit_column, c, tiles);
        let query_index = pair.first_query + column as i32;
        let of_query = if comptime!(tiles.has_fragments()) {
            RowLseDelta {
                reference: lse_delta[column / 4].extract(comptime!(c % 4)),
                delta: lse_delta[of_term + column / 4].extract(comptime!(c % 4)),
                logarithm: lse_delta[comptime!(2 * of_term) + column / 4].extract(comptime!(c % 4)),
            }
        } else {
            row_lse_delta_of(
                rows,
                pair.batch,
                pair.head,
                query_index,
                scoring.seq_lens.q_len,
            )
        };
        #[unroll]
        for k in 0..comptime!(tiles.rows_per_unit()) {
            let at = comptime!(k * tiles.columns_per_unit() + c);
            let place = ScorePlace::new(
                pair.batch,
                pair.head,
                query_index,
                pair.first_key + tile_row(unit_row, k, tiles) as i32,
                seq_info.offset,
            );
            let visible = is_visible(whole, scoring, seq_info, &place, kind.structure);
            let gradient = score_gradient(
                s[at],
                dp[at],
                of_query,
                visible,
                scoring,
                place,
                kind.score,
                comptime!(!tiles.has_fragments()),
            );
            let mut p = gradient.p;
            if comptime!(tiles.has_fragments()) {
                p *= f32::new(comptime!(tiles.p_scale()));
                if comptime!(kind.score.dropout) {
                    // With dropout, P includes the factor `kept_scale` = 1 / (1 − drop probability), so P may exceed
                    // the range of half precision. The kernel therefore divides P by `kept_scale` here, and multiplies
                    // the finished dV by `kept_scale`.
                    p /= kept_scale(&scoring.dropout);
                }
            }
            s[at] = p;
            dp[at] = gradient.ddot;
        }
    }
}
