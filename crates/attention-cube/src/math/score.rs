//! From `q·k` to the score, and the derivatives of that: scale, softcap, bias, visibility.

use super::visibility::{Extent, Sight, Structure, sees};
use crate::math::softcap::{NEAR, SERIES};
use cubecl::prelude::*;

/// What maxima start from: no score is lower but −∞, that of a hidden key.
pub(crate) const LOWEST: f32 = f32::MIN;

/// Whether a score, or what it is made of, is −∞. By its bits, since shading languages may take every number for finite.
#[cube]
pub(crate) fn is_hidden(score: f32) -> bool {
    u32::reinterpret(score) == 0xFF80_0000u32
}

/// The bits of −0, the saved logarithm of a query that sees no key.
const NO_KEYS: u32 = 0x8000_0000;

/// The logarithm that a forward saves beside a query's reference: that of the `sum`, or −0 for a query that sees no key. As an addend
/// −0 is 0, and no sum has −0 for a logarithm, so that a backward knows a query without keys from one whose sink hides their share.
#[cube]
pub(crate) fn saved_logarithm(sum: f32, has_keys: bool) -> f32 {
    let logarithm = sum.ln();
    // The bits decide, since shading languages may drop the sign of a zero in arithmetic.
    let bits = select(logarithm == 0.0f32, 0u32, u32::reinterpret(logarithm));
    f32::reinterpret(select(has_keys, bits, comptime!(NO_KEYS)))
}

/// Whether a query sees no key, by the logarithm that the forward saved.
#[cube]
pub(crate) fn saw_no_key(logarithm: f32) -> bool {
    u32::reinterpret(logarithm) == comptime!(NO_KEYS)
}

/// The numbers that a score depends on.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct ScoreArguments {
    pub scale: f32,
    /// Read only where a softcap is compiled in.
    pub softcap: f32,
    /// −∞, for the score of a hidden key and the logsumexp of a query that sees nothing: not every shading language has it.
    pub negative_infinity: f32,
}

/// What a score is made of, known when the kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ScoreKind {
    pub softcap: bool,
    /// The softcap is far above most scores: see [`crate::math::softcap`].
    pub wide_softcap: bool,
    pub bias: bool,
}

impl ScoreKind {
    /// Whether a key that a query does not see may lie in a block's run of visible keys, so that rows
    /// which nobody in the tile uses must be kept from being multiplied by zero.
    pub(crate) const fn leaves_masked(&self, structure: &Structure) -> bool {
        self.bias || structure.is_irregular()
    }
}

/// What hides keys, and what makes scores of dots, where units read a mask's element a score.
///
/// An option of a reference is invariant, and a kernel's arguments have each a lifetime of their own, so there is one for each tensor.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Scoring<'lengths, 'mask, 'bias, M: Numeric, F: Float> {
    pub extent: Extent,
    /// Lengths of sequences, ids of segments, and bounds of these in blocks.
    pub lengths_and_ids: ComptimeOption<&'lengths Tensor<i32>>,
    pub mask: ComptimeOption<&'mask Tensor<M>>,
    pub bias: ComptimeOption<&'bias Tensor<F>>,
    pub arguments: ScoreArguments,
}

/// A kernel's arguments, as its functions pass them on.
#[cube]
pub(crate) fn scoring<'lengths, 'mask, 'bias, M: Numeric, F: Float>(
    extent: Extent,
    lengths_and_ids: ComptimeOption<&'lengths Tensor<i32>>,
    mask: ComptimeOption<&'mask Tensor<M>>,
    bias: ComptimeOption<&'bias Tensor<F>>,
    arguments: ScoreArguments,
) -> Scoring<'lengths, 'mask, 'bias, M, F> {
    Scoring::<'lengths, 'mask, 'bias, M, F> {
        extent,
        lengths_and_ids,
        mask,
        bias,
        arguments,
    }
}

/// Where a score stands.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Place {
    pub batch: u32,
    pub head: u32,
    pub query: i32,
    pub key: i32,
}

/// Where `place` lies in a mask or a bias, expanded to `[batch, q_heads, q_len, kv_len]` by its strides.
#[cube]
fn offset(place: &Place, batch: usize, head: usize, query: usize, key: usize) -> usize {
    place.batch as usize * batch
        + place.head as usize * head
        + place.query as usize * query
        + place.key as usize * key
}

/// The score without bias: `softcap(scale · dot)`.
#[cube]
pub(crate) fn capped(dot: f32, arguments: &ScoreArguments, #[comptime] kind: ScoreKind) -> f32 {
    // As a product alone, a backward's might be fused with what is subtracted, and a large one would miss its rounded reference.
    let mut score = fma(dot, arguments.scale, 0.0f32);
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

/// The score under a wide softcap, for every engine: see [`crate::math::softcap`]. `far` is what the engine's own tangent gives,
/// and taken far from zero.
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

/// `d score / d dot`, from the score without bias; without the scale, if not `scaled`.
#[cube]
pub(crate) fn slope(
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

/// Adds the bias; one of −∞ gives `hidden`, whatever the score is.
#[cube]
pub(crate) fn biased<F: Float>(
    score: f32,
    bias: &ComptimeOption<&Tensor<F>>,
    place: &Place,
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

/// The score with its bias; one of −∞ gives `hidden`, whatever the score is.
#[cube]
pub(crate) fn plus_bias(score: f32, bias: f32, hidden: f32) -> f32 {
    select(is_hidden(bias), hidden, score + bias)
}

/// Whether the place exists and is visible by window, length, segments and mask. In a `whole` block all
/// are.
#[cube]
pub(crate) fn is_visible<M: Numeric, F: Float>(
    whole: bool,
    scoring: &Scoring<'_, '_, '_, M, F>,
    sight: &Sight,
    place: &Place,
    #[comptime] structure: Structure,
) -> bool {
    let mut visible = true;
    if !whole {
        visible = place.query < scoring.extent.q_len && place.key < scoring.extent.kv_len;
        if visible {
            visible = sees(
                sight,
                &scoring.extent,
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
                        visible = mask[offset(
                            place,
                            mask.stride(0),
                            mask.stride(1),
                            mask.stride(2),
                            mask.stride(3),
                        )] != M::from_int(0);
                    }
                }
                ComptimeOption::None => {}
            }
        }
    }
    visible
}

/// The softmax's numerator by `reference`; 0 for what is hidden, and for a bias of −∞. A NaN stays one.
#[cube]
pub(crate) fn numerator(score: f32, reference: f32) -> f32 {
    select(is_hidden(score), 0.0f32, (score - reference).exp())
}

/// The same divided by a sum of this `logarithm`.
#[cube]
pub(crate) fn probability(score: f32, reference: f32, logarithm: f32) -> f32 {
    let difference = (score - reference) - logarithm;
    select(is_hidden(score), 0.0f32, difference.exp())
}
