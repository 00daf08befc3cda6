//! Converts a problem's tensors and sizes into kernel arguments.

use crate::math::dropout::kernel::DropoutArgumentsLaunch;
use crate::math::inputs::HeadSizesLaunch;
use crate::math::schedule::GridLaunch;
use crate::math::score::{ScoreArgumentsLaunch, ScoreKind};
use crate::math::softcap;
use crate::math::visibility::Structure;
use crate::problem::AttentionProblem;
use crate::types::request::Operands;
use crate::types::tensors::AttentionInputs;
use burn_cubecl::{CubeBackend, cubecl, tensor::CubeTensor};
use cubecl::prelude::TensorArg;

/// True if kernels can load the tensor's rows in vectors of `size` elements. Every row must be contiguous and start at
/// a multiple of `size` elements, and the row's length must be a multiple of `size`. The function does not check the
/// alignment of the tensor's first element, because Burn aligns it.
pub(crate) fn is_in_vectors(tensor: &CubeTensor, size: usize) -> bool {
    let strides = tensor.meta.strides();
    let shape = tensor.meta.shape();
    strides[3] == 1
        && shape[3].is_multiple_of(size)
        && (0..3).all(|dim| shape[dim] == 1 || strides[dim].is_multiple_of(size))
}

/// The number of leading dimensions of `[batch, heads, len, dim]` that may have stride 0 (broadcast) if TMA reads the
/// tensor. The number is 1 for queries (batch), and 2 for keys and values (batch and heads).
pub(crate) const BROADCAST_QUERIES: usize = 1;
pub(crate) const BROADCAST_KEYS: usize = 2;

/// Returns the set of operands that Hopper's copy engine (TMA) can read in place.
pub(crate) fn tma_operands(
    inputs: &AttentionInputs<CubeBackend>,
    output_gradient: Option<&CubeTensor>,
) -> Operands {
    Operands {
        query: is_tma_readable(&inputs.query, BROADCAST_QUERIES),
        key: is_tma_readable(&inputs.key, BROADCAST_KEYS),
        value: is_tma_readable(&inputs.value, BROADCAST_KEYS),
        output_gradient: output_gradient
            .is_some_and(|gradient| is_tma_readable(gradient, BROADCAST_QUERIES)),
    }
}

/// Changes the size of broadcast dimensions (stride 0) to 1. The function changes only the first `dims` dimensions.
#[cfg(feature = "cuda")]
pub(crate) fn collapse_broadcast_dims(tensor: &CubeTensor, dims: usize) -> CubeTensor {
    let mut tensor = tensor.clone();
    for dim in 0..dims {
        if tensor.meta.strides()[dim] == 0 {
            tensor.meta.shape[dim] = 1;
        }
    }
    tensor
}

/// True if Hopper's TMA can read boxes of the tensor in place. Among other conditions, only the first `broadcast`
/// dimensions may have a stride of 0.
pub(crate) fn is_tma_readable(tensor: &CubeTensor, broadcast: usize) -> bool {
    let strides = tensor.meta.strides();
    let shape = tensor.meta.shape();
    let fits = |dim: usize| match strides[dim] {
        _ if shape[dim] == 1 => true,
        0 => dim < broadcast,
        stride => (stride * tensor.dtype.size()).is_multiple_of(16),
    };
    (shape[3] == 1 || strides[3] == 1) && (0..3).all(fits)
}

/// Returns the kinds of masking that the problem needs. Kernels receive them as a compile-time setting.
pub(crate) fn structure(problem: &AttentionProblem) -> Structure {
    Structure {
        lengths: problem.kv_lengths,
        lengths_ahead: false,
        query_lengths: problem.query_lengths,
        segments: problem.segments,
        intervals: problem.intervals,
        mask: problem.mask.is_some(),
        mask_block: problem.mask_block,
    }
}

pub(crate) fn score_kind(problem: &AttentionProblem) -> ScoreKind {
    ScoreKind {
        softcap: problem.softcap.is_some(),
        wide_softcap: softcap::is_wide(problem.softcap),
        bias: problem.bias.is_some(),
        dropout: problem.dropout.is_some(),
        score_mod: problem.score_mod,
        mask_mod: problem.mask_mod,
    }
}

/// Returns the dropout of the problem as a kernel argument.
pub(crate) fn dropout_arguments(problem: &AttentionProblem) -> Option<DropoutArgumentsLaunch> {
    problem.dropout.map(|dropout| {
        let threshold = dropout.threshold();
        DropoutArgumentsLaunch::new(
            dropout.seed as u32,
            (dropout.seed >> 32) as u32,
            threshold.bits << 16 | threshold.bits,
            threshold.kept_scale() as f32,
            (-1.0 / threshold.kept_scale()) as f32,
            problem.q_heads as u32,
            threshold.keeps_hits,
        )
    })
}

pub(crate) fn score_arguments(problem: &AttentionProblem) -> ScoreArgumentsLaunch {
    ScoreArgumentsLaunch::new(
        problem.scale as f32,
        problem.softcap.unwrap_or(1.0) as f32,
        f32::NEG_INFINITY,
    )
}

/// Returns the problem's head sizes as a kernel argument.
pub(crate) fn head_sizes(problem: &AttentionProblem) -> HeadSizesLaunch {
    HeadSizesLaunch::new(
        problem.group() as u32,
        problem.head_dim as u32,
        problem.value_dim as u32,
    )
}

/// Returns the number of cubes of a launch, and the launch's grid of tiles, splits, heads and sequences. The cubes are
/// ordered by groups of `together` heads, where heads of different sequences count separately. The cubes of all tiles
/// of one group come before the cubes of the next group.
pub(crate) fn grid(
    tiles: usize,
    splits: usize,
    heads: usize,
    batch: usize,
    together: usize,
) -> (usize, GridLaunch) {
    let cubes = tiles * splits * heads * batch;
    let grid = GridLaunch::new(
        tiles as u32,
        splits as u32,
        heads as u32,
        (heads * batch) as u32,
        together.min(heads * batch) as u32,
        cubes as u32,
    );
    (cubes, grid)
}

/// Converts a tensor into a kernel argument. The kernel may read the tensor or write to it.
pub(crate) fn tensor_arg(tensor: &CubeTensor) -> TensorArg {
    tensor.clone().into_tensor_arg()
}
