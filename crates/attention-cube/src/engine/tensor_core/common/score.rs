//! Computes the scores of a fragment: applies the scale, the softcap and the bias, and sets each hidden score to −∞.

use super::bias::{BiasWords, add_words};
use super::block_mask::BlockMask;
use super::mask::{PAIRS_PER_WORD, bits_of_word};
use super::score_mod::{final_scores, is_one_sided};
use super::scoring::Scoring;
use super::softcap::{all_capped_together, capped, caps_together};
use super::{FragmentKind, RowPair, known, own_column, pair_of, shown};
use cube_kit::nvidia::accumulator::is_second;
use cubecl::prelude::*;

/// Computes the scores of `columns` columns, starting at `first_column`. A hidden score is −∞. In a fully visible
/// block, only a bias or the mask mod can hide a score.
#[cube]
pub(crate) fn score<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    first_column: i32,
    block_mask: &BlockMask,
    rows: &RowPair,
    bias_words: BiasWords,
    scoring: &Scoring<F, NB>,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> Vector<f32, NS> {
    let mut s = s;
    if comptime!(kind.score.score_mod.is_some() || kind.score.mask_mod.is_some()) {
        // With a score mod or mask mod, the scores are computed in two code paths. The first path is for fully visible
        // blocks in which all distances have the same sign. If one computation served both paths, ptxas would copy
        // every score to another register before the branch.
        let one_sided = comptime!(kind.score.score_mod.is_some());
        let simple = if comptime!(one_sided) {
            block_mask.whole && is_one_sided::<F, NB>(rows, scoring, first_column, columns, kind)
        } else {
            block_mask.whole
        };
        if simple {
            s = scored::<F, NB, NS>(
                s,
                first_column,
                true.runtime(),
                rows,
                bias_words,
                scoring,
                columns,
                one_sided,
                kind,
            );
        } else {
            s = scored::<F, NB, NS>(
                s,
                first_column,
                false.runtime(),
                rows,
                bias_words,
                scoring,
                columns,
                false,
                kind,
            );
            if !block_mask.whole {
                s = masked::<F, NB, NS>(s, first_column, block_mask, rows, scoring, columns, kind);
            }
        }
    } else {
        s = scored::<F, NB, NS>(
            s,
            first_column,
            block_mask.whole,
            rows,
            bias_words,
            scoring,
            columns,
            false,
            kind,
        );
        if !block_mask.whole {
            s = masked::<F, NB, NS>(s, first_column, block_mask, rows, scoring, columns, kind);
        }
    }
    s
}

/// Sets the scores of hidden columns to −∞.
#[cube]
fn masked<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    first_column: i32,
    block_mask: &BlockMask,
    rows: &RowPair,
    scoring: &Scoring<F, NB>,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> Vector<f32, NS> {
    let mut s = s;
    let known = known::<F, NB>(rows, scoring, kind);
    let mut bits_0 = u32::new(0);
    let mut bits_1 = u32::new(0);
    #[unroll]
    for pair in 0..columns / 4 {
        if comptime!(kind.structure.is_irregular() && pair % PAIRS_PER_WORD == 0) {
            let bits = bits_of_word(
                block_mask.mask_words,
                &known,
                first_column,
                comptime!(pair / PAIRS_PER_WORD),
            );
            bits_0 = bits.first;
            bits_1 = bits.second;
        }
        let shown = shown(
            pair_of::<NS>(s, pair),
            &known,
            if comptime!(is_second(2 * pair)) {
                bits_1
            } else {
                bits_0
            },
            own_column(first_column, pair),
            scoring.arguments.negative_infinity,
            pair,
            kind,
        );
        s.insert(comptime!(2 * pair), shown.first);
        s.insert(comptime!(2 * pair + 1), shown.second);
    }
    s
}

/// Turns the dot products `s` into scores, without the mask. A `raw` kernel keeps unscaled dot products. For a `raw`
/// kernel, the function therefore returns `s` unchanged. If `one_sided` is true, the fragment must satisfy
/// [`is_one_sided`].
#[cube]
fn scored<F: Float, NB: Size, NS: Size>(
    s: Vector<f32, NS>,
    first_column: i32,
    whole: bool,
    rows: &RowPair,
    bias_words: BiasWords,
    scoring: &Scoring<F, NB>,
    #[comptime] columns: usize,
    #[comptime] one_sided: bool,
    #[comptime] kind: FragmentKind,
) -> Vector<f32, NS> {
    let arguments = &scoring.arguments;
    let mut s = s;
    if comptime!(kind.reads_ahead()) {
        let half = comptime!(kind.half_of_bias());
        s = add_words::<NS>(s, bias_words, arguments, columns, half, kind);
    } else if comptime!(!kind.raw) {
        // In a partly visible block, a hidden NaN would spoil a visible score, so each score has its own reciprocal.
        let together = if comptime!(caps_together(kind.score)) {
            whole
        } else {
            false.runtime()
        };
        if together {
            s = all_capped_together::<NS>(s, arguments, columns);
        } else {
            let known = known::<F, NB>(rows, scoring, kind);
            #[unroll]
            for pair in 0..columns / 4 {
                let capped = capped(pair_of::<NS>(s, pair), arguments, kind.score);
                let existing = min(own_column(first_column, pair) as u32, known.last_pair);
                let values = final_scores::<F, NB>(
                    capped,
                    scoring,
                    &known,
                    first_column,
                    existing,
                    pair,
                    one_sided,
                    kind,
                );
                s.insert(comptime!(2 * pair), values.first);
                s.insert(comptime!(2 * pair + 1), values.second);
            }
        }
    }
    s
}
