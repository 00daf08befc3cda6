//! What travels together through a kernel: where masks and biases lie, and the numbers by which scores are made.
//!
//! An option of a reference is invariant, and a kernel's arguments have each a lifetime of their own, so the structs have one for each
//! tensor. They cost a kernel nothing: they are gone when it is compiled.

use crate::math::score::ScoreArguments;
use crate::math::visibility::Extent;
use crate::passes::mask_bits::kernel::MaskPlaces;
use cubecl::prelude::*;

/// What hides keys.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Masking<'lengths, 'mask> {
    pub extent: Extent,
    /// Lengths of sequences, ids of segments, and bounds of these in blocks.
    pub lengths_and_ids: ComptimeOption<&'lengths Tensor<i32>>,
    /// The mask's bits, and what tiles see of blocks by it.
    pub mask: ComptimeOption<&'mask Tensor<u32>>,
    pub mask_places: MaskPlaces,
}

/// What makes scores of dots, and hides some.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct Scoring<'lengths, 'mask, 'bias, F: Float, NB: Size> {
    pub masking: Masking<'lengths, 'mask>,
    pub bias: ComptimeOption<&'bias Tensor<Vector<F, NB>>>,
    pub arguments: ScoreArguments,
}

/// A kernel's arguments, as its functions pass them on.
#[cube]
pub(crate) fn scoring<'lengths, 'mask, 'bias, F: Float, NB: Size>(
    extent: Extent,
    lengths_and_ids: ComptimeOption<&'lengths Tensor<i32>>,
    mask: ComptimeOption<&'mask Tensor<u32>>,
    mask_places: MaskPlaces,
    bias: ComptimeOption<&'bias Tensor<Vector<F, NB>>>,
    arguments: ScoreArguments,
) -> Scoring<'lengths, 'mask, 'bias, F, NB> {
    let masking = Masking::<'lengths, 'mask> {
        extent,
        lengths_and_ids,
        mask,
        mask_places,
    };
    Scoring::<'lengths, 'mask, 'bias, F, NB> {
        masking,
        bias,
        arguments,
    }
}
