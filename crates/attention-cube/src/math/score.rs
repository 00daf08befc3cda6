//! Computes a score from `q·k` by scale, softcap, bias and visibility. Also computes the derivative of the score with
//! respect to `q·k`.

use super::visibility::{SeqInfo, SeqLens, Structure, sees};
use crate::math::dropout::kernel::DropoutArguments;
use crate::math::score_mod::kernel::{
    KernelTables, changed_score, derivative_of_change, shown_score,
};
use crate::math::score_mod::{MaskCode, ScoreCode, ScorePlace};
use crate::math::softcap::{NEAR, SERIES};
use cubecl::prelude::*;

/// The initial row maximum (row_max). Only −∞, the score of a hidden key, is lower.
pub(crate) const LOWEST: f32 = f32::MIN;

/// True if a score or bias is −∞. The test compares bits, because shading-language compilers may remove a float comparison
/// with −∞.
#[cube]
pub(crate) fn is_hidden(score: f32) -> bool {
    u32::reinterpret(score) == 0xFF80_0000u32
}

/// The bits of −0, which are saved as the logarithm of the softmax sum if a query sees no key.
const NO_KEYS: u32 = 0x8000_0000;

/// Returns the second part of a query's logsumexp: `ln(sum)`, or −0 for a query that sees no key. A forward pass saves
/// both parts. The first part is the reference score, which the softmax subtracts and which is near the row maximum.
///
/// For a query that sees keys, the result is never −0. A backward pass can therefore recognize a query that sees no
/// key.
#[cube]
pub(crate) fn saved_logarithm(sum: f32, has_keys: bool) -> f32 {
    let logarithm = sum.ln();
    // A device may compute the logarithm of 1 as −0. This −0 is replaced by +0, because −0 marks a query that sees no
    // key. The replacement selects bits, because shading languages may drop the sign of a zero in arithmetic.
    let bits = select(logarithm == 0.0f32, 0u32, u32::reinterpret(logarithm));
    f32::reinterpret(select(has_keys, bits, comptime!(NO_KEYS)))
}

/// True if a logarithm that a forward pass saved marks a query that sees no key.
#[cube]
pub(crate) fn saw_no_key(logarithm: f32) -> bool {
    u32::reinterpret(logarithm) == comptime!(NO_KEYS)
}

/// The runtime parameters of a score.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreArguments {
    pub scale: f32,
    /// The softcap. Kernels read this field only if they are compiled for scores with a softcap.
    pub softcap: f32,
    /// The value −∞. The kernels get this value as an argument, because some shading languages have no literal for −∞.
    pub negative_infinity: f32,
}

/// The compile-time settings of a score.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScoreKind {
    pub softcap: bool,
    /// True if the softcap is wide (far above most scores). The module [`crate::math::softcap`] explains wide softcaps.
    pub wide_softcap: bool,
    pub bias: bool,
    /// True if probabilities are dropped at random.
    pub dropout: bool,
    /// The code that changes each score after the softcap.
    pub score_mod: Option<ScoreCode>,
    /// The code that hides keys.
    pub mask_mod: Option<MaskCode>,
}

impl ScoreKind {
    /// True if a key that no query of a tile sees may lie between two keys that some of these queries see. Kernels must
    /// then set the hidden rows of a block of K or V to zero before they multiply P or dS by the block. A hidden row
    /// may hold NaN, and 0 × NaN is NaN.
    pub(crate) const fn leaves_masked(&self, structure: &Structure) -> bool {
        self.bias || self.mask_mod.is_some() || structure.is_irregular()
    }

    /// True if the derivative of a score with respect to `q·k` is not a constant, because of a softcap or a score mod.
    #[cfg(feature = "cuda")]
    pub(crate) const fn has_slope(&self) -> bool {
        self.softcap || self.score_mod.is_some()
    }

    /// True if a bias is added to the product of `q·k` and the scale. The bias is the problem's bias, or a number that the
    /// score mod adds.
    pub(crate) fn adds_to_product(&self) -> bool {
        let adds_bias = match self.score_mod {
            Some(code) => code.adds_bias,
            None => self.bias,
        };
        adds_bias && !self.softcap
    }
}

/// The inputs that hide keys and turn `q·k` into scores.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Scoring<M: Numeric, F: Float> {
    pub seq_lens: SeqLens,
    /// The packed i32 buffer: sequence lengths, segment ids, key intervals of queries, and bounds of blocks.
    pub lengths_and_ids: ComptimeOption<OwnedTensor<i32>>,
    pub mask: ComptimeOption<OwnedTensor<M>>,
    pub bias: ComptimeOption<OwnedTensor<F>>,
    pub arguments: ScoreArguments,
    pub dropout: ComptimeOption<DropoutArguments>,
    pub tables: KernelTables,
}

/// Returns the element offset of a score in a mask or bias. `place` has the score's sequence, head, query and key. The
/// other arguments are the strides of these four dimensions, in elements.
#[cube]
fn offset(place: &ScorePlace, batch: usize, head: usize, query: usize, key: usize) -> usize {
    place.batch as usize * batch
        + place.head as usize * head
        + place.query as usize * query
        + place.key as usize * key
}

/// Returns the element offset of a score in a mask with the given strides, in elements. A block mask has one element
/// per block of queries and block of keys.
#[cube]
fn mask_offset(
    place: &ScorePlace,
    batch: usize,
    head: usize,
    query: usize,
    key: usize,
    #[comptime] structure: Structure,
) -> usize {
    if comptime!(structure.has_block_mask()) {
        let row = place.query / comptime!(structure.mask_block[0] as i32);
        let column = place.key / comptime!(structure.mask_block[1] as i32);
        place.batch as usize * batch
            + place.head as usize * head
            + row as usize * query
            + column as usize * key
    } else {
        offset(place, batch, head, query, key)
    }
}

/// A tile of queries and a block of keys, as ranges of query heads, queries and keys. No range is empty.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct TileAndBlock {
    pub batch: u32,
    pub first_head: u32,
    pub last_head: u32,
    pub first_query: i32,
    pub last_query: i32,
    pub first_key: i32,
    pub last_key: i32,
}

/// True if the block mask shows a key of the block to a query of the tile. Without a block mask, the function returns
/// true, because it does not search masks with one element per score. Rows past the last query and key do not count.
#[cube]
pub(crate) fn block_mask_shows<M: Numeric, F: Float>(
    scoring: &Scoring<M, F>,
    pair: &TileAndBlock,
    #[comptime] structure: Structure,
) -> bool {
    let mut shown = true;
    if comptime!(structure.has_block_mask()) {
        let rows = comptime!(structure.mask_block[0] as i32);
        let columns = comptime!(structure.mask_block[1] as i32);
        let last_row = min(pair.last_query, scoring.seq_lens.q_len - 1i32) / rows;
        let last_column = min(pair.last_key, scoring.seq_lens.kv_len - 1i32) / columns;
        #[comptime]
        match &scoring.mask {
            ComptimeOption::Some(mask) => {
                shown = false;
                let mut head = pair.first_head;
                while head <= pair.last_head && !shown {
                    let mut row = pair.first_query / rows;
                    while row <= last_row && !shown {
                        let mut column = pair.first_key / columns;
                        while column <= last_column && !shown {
                            let element = pair.batch as usize * mask.stride(0)
                                + head as usize * mask.stride(1)
                                + row as usize * mask.stride(2)
                                + column as usize * mask.stride(3);
                            shown = mask[element] != M::from_int(0);
                            column += 1i32;
                        }
                        row += 1i32;
                    }
                    head += 1u32;
                }
            }
            ComptimeOption::None => {}
        }
    }
    shown
}

/// Returns the score without the bias: `softcap(scale · dot)`, where `dot` is `q·k`.
#[cube]
pub(crate) fn capped(dot: f32, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> f32 {
    let mut score = if comptime!(kind.adds_to_product()) {
        // This branch multiplies without `fma`, so that the compiler fuses the multiplication and the later addition of
        // the bias into one FMA. The tensor-core forward kernel also fuses the two operations. A backward kernel must
        // round its scores like the forward kernel.
        dot * arguments.scale
    } else {
        // The `fma` rounds the product, so that the compiler cannot fuse the multiplication with the later subtraction
        // of the reference score. The reference score is itself a rounded product. If the score were not rounded like
        // the reference score, the rounding error would reach the probability.
        fma(dot, arguments.scale, 0.0f32)
    };
    if comptime!(kind.softcap) {
        let far = arguments.softcap * (score / arguments.softcap).tanh();
        score = if comptime!(kind.wide_softcap) {
            widely_capped(score, far, arguments.softcap)
        } else {
            far
        };
    }
    score
}

/// Returns the score under a wide softcap (see [`crate::math::softcap`]). `far` is `softcap · tanh(score / softcap)` as
/// the engine computes it. For scores far from zero, the function returns `far`. For all other scores, it returns the
/// value of a polynomial.
#[cube]
pub(crate) fn widely_capped(score: f32, far: f32, softcap: f32) -> f32 {
    let ratio = score * (1.0f32 / softcap);
    let squared = ratio * ratio;
    let mut series = f32::new(0.0);
    #[unroll]
    for term in 0..comptime!(SERIES.len()) {
        series = fma(
            series,
            squared,
            f32::new(comptime!(SERIES[SERIES.len() - 1 - term])),
        );
    }
    let near = fma(score * squared, series, score);
    select(ratio.abs() < NEAR, near, far)
}

/// Returns `d score / d (q·k)`, computed from the score before the bias. If `scaled` is false, the derivative lacks the
/// factor `scale`.
#[cube]
fn slope(
    capped: f32,
    arguments: &ScoreArguments,
    #[comptime] kind: ScoreKind,
    #[comptime] scaled: bool,
) -> f32 {
    let mut slope = f32::new(1.0);
    if comptime!(scaled) {
        slope = arguments.scale;
    }
    if comptime!(kind.softcap) {
        let tanh = capped / arguments.softcap;
        slope *= 1.0f32 - tanh * tanh;
    }
    slope
}

/// Adds a bias to the score at `place` (sequence, head, query and key). The bias is the bias tensor's element for this
/// place. If the bias is −∞, the result is `hidden`, whatever the score is.
#[cube]
fn biased<F: Float>(
    score: f32,
    bias: &ComptimeOption<OwnedTensor<F>>,
    place: &ScorePlace,
    hidden: f32,
) -> f32 {
    #[comptime]
    match bias {
        ComptimeOption::Some(bias) => {
            let bias = f32::cast_from(
                bias[offset(
                    place,
                    bias.stride(0),
                    bias.stride(1),
                    bias.stride(2),
                    bias.stride(3),
                )],
            );
            plus_bias(score, bias, hidden)
        }
        ComptimeOption::None => score,
    }
}

/// Returns the score after score mod, bias and mask mod. `capped` is the score after the softcap. If the mask mod or a bias
/// of −∞ hides the key, the result is −∞, whatever `capped` is.
#[cube]
pub(crate) fn final_score<M: Numeric, F: Float>(
    capped: f32,
    scoring: &Scoring<M, F>,
    place: ScorePlace,
    #[comptime] kind: ScoreKind,
) -> f32 {
    let hidden = scoring.arguments.negative_infinity;
    let score = changed_score(capped, place, &scoring.tables, kind.score_mod);
    let score = biased(score, &scoring.bias, &place, hidden);
    shown_score(score, place, &scoring.tables, hidden, kind.mask_mod)
}

/// Returns `d final_score / d (q·k)`, computed from the score before score mod and bias. If `scaled` is false, the
/// derivative lacks the factor `scale`.
#[cube]
pub(crate) fn final_slope<M: Numeric, F: Float>(
    capped: f32,
    scoring: &Scoring<M, F>,
    place: ScorePlace,
    #[comptime] kind: ScoreKind,
    #[comptime] scaled: bool,
) -> f32 {
    let slope = slope(capped, &scoring.arguments, kind, scaled);
    if comptime!(kind.score_mod.is_some()) {
        slope * derivative_of_change(capped, place, &scoring.tables, kind.score_mod)
    } else {
        slope
    }
}

/// Adds a bias to the score. If the bias is −∞, the result is `hidden`, whatever the score is.
#[cube]
pub(crate) fn plus_bias(score: f32, bias: f32, hidden: f32) -> f32 {
    select(is_hidden(bias), hidden, score + bias)
}

/// True if the query and the key exist, and window, length, segments, intervals and mask all let the query see the key.
/// If `whole` is true, the caller guarantees that every score of the tile is visible. The function then returns true
/// without a check.
#[cube]
pub(crate) fn is_visible<M: Numeric, F: Float>(
    whole: bool,
    scoring: &Scoring<M, F>,
    seq_info: &SeqInfo,
    place: &ScorePlace,
    #[comptime] structure: Structure,
) -> bool {
    let mut visible = true;
    if !whole {
        visible = place.query < scoring.seq_lens.q_len && place.key < scoring.seq_lens.kv_len;
        if visible {
            visible = sees(
                seq_info,
                &scoring.seq_lens,
                &scoring.lengths_and_ids,
                place.batch,
                place.query,
                place.key,
                structure,
            );
            #[comptime]
            match &scoring.mask {
                ComptimeOption::Some(mask) => {
                    if visible {
                        visible = mask[mask_offset(
                            place,
                            mask.stride(0),
                            mask.stride(1),
                            mask.stride(2),
                            mask.stride(3),
                            structure,
                        )] != M::from_int(0);
                    }
                }
                ComptimeOption::None => {}
            }
        }
    }
    visible
}

/// Returns `exp(score − reference)`, or 0 for a hidden score (−∞). A NaN score gives NaN.
#[cube]
pub(crate) fn numerator(score: f32, reference: f32) -> f32 {
    select(is_hidden(score), 0.0f32, (score - reference).exp())
}

/// Returns `exp(score − reference − logarithm)`, or 0 for a hidden score (−∞). `logarithm` is the logarithm of the softmax
/// sum relative to `reference`.
#[cube]
pub(crate) fn probability(score: f32, reference: f32, logarithm: f32) -> f32 {
    let difference = (score - reference) - logarithm;
    select(is_hidden(score), 0.0f32, difference.exp())
}
