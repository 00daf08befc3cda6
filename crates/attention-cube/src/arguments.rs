//! A problem's tensors and numbers as kernels take them.

use crate::AttentionProblem;
use crate::backend::AttentionInputs;
use crate::math::schedule::GridLaunch;
use crate::math::score::{ScoreArgumentsLaunch, ScoreKind};
use crate::math::softcap;
use crate::math::visibility::Structure;
use crate::passes::lengths::{Blocks, Places, prepare};
use crate::select::Operands;
use burn::backend::{
    cubecl::dtype_to_storage_type,
    ops::{BoolTensorOps, FloatTensorOps},
};
use burn::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, cubecl, tensor::CubeTensor};
use cubecl::ir::ElemType;
use cubecl::prelude::TensorArg;

/// Whether every row lies together and consists of vectors of `size` elements. Burn's views start where
/// a device may bind a buffer, which is coarser.
pub(crate) fn is_in_vectors(tensor: &CubeTensor, size: usize) -> bool {
    let strides = tensor.meta.strides();
    let shape = tensor.meta.shape();
    strides[3] == 1
        && shape[3].is_multiple_of(size)
        && (0..3).all(|dim| shape[dim] == 1 || strides[dim].is_multiple_of(size))
}

/// Dimensions from the first on along which the copy engine can read queries, and keys and values, with a stride of 0.
pub(crate) const BROADCAST_QUERIES: usize = 1;
pub(crate) const BROADCAST_KEYS: usize = 2;

/// The operands that Hopper's copy engine can read.
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

/// The tensor with size 1 along those of its first `dims` dimensions where it repeats with a stride of 0.
#[cfg(feature = "cuda")]
pub(crate) fn distinct(tensor: &CubeTensor, dims: usize) -> CubeTensor {
    let mut tensor = tensor.clone();
    for dim in 0..dims {
        if tensor.meta.strides()[dim] == 0 {
            tensor.meta.shape[dim] = 1;
        }
    }
    tensor
}

/// Whether Hopper's copy engine can read boxes of the tensor, whose first `broadcast` dimensions may have
/// a stride of 0.
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

/// Mask, bias and integers as kernels take them, and the element types that stand in where they are absent.
pub(crate) struct Extras {
    pub mask: Option<CubeTensor>,
    pub bias: Option<CubeTensor>,
    pub lengths_and_ids: Option<CubeTensor>,
    pub mask_element: ElemType,
    pub bias_element: ElemType,
}

impl Extras {
    /// For kernels with these blocks, and the places that each of them finds the integers at.
    pub(crate) fn new(
        inputs: &AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
        blocks: &[Blocks],
    ) -> (Self, Vec<Places>) {
        let (lengths_and_ids, places) = prepare(inputs, problem, blocks);
        // Kernels read these at `[batch, q_heads, q_len, kv_len]`, by their strides.
        let scores = Shape::new([
            problem.batch,
            problem.q_heads,
            problem.q_len,
            problem.kv_len,
        ]);
        let mask = inputs.mask.as_option();
        let mask = mask.map(|mask| CubeBackend::bool_expand(mask.clone(), scores.clone()));
        let bias = inputs.bias.as_option();
        let bias = bias.map(|bias| CubeBackend::float_expand(bias.clone(), scores));
        let element = |tensor: &Option<CubeTensor>, absent| {
            dtype_to_storage_type(tensor.as_ref().map_or(absent, |tensor| tensor.dtype))
        };
        let extras = Self {
            mask_element: element(&mask, DType::U32),
            bias_element: element(&bias, DType::F32),
            mask,
            bias,
            lengths_and_ids,
        };
        (extras, places)
    }

    /// Whether the bias is one number for all scores of a head.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_bias_of_head(&self) -> bool {
        let strides = self.bias.as_ref().map(|bias| &bias.meta.strides()[2..]);
        strides.is_some_and(|strides| strides == [0, 0])
    }

    pub(crate) fn mask(&self) -> Option<TensorArg> {
        self.mask.clone().map(CubeTensor::into_tensor_arg)
    }

    pub(crate) fn bias(&self) -> Option<TensorArg> {
        self.bias.clone().map(CubeTensor::into_tensor_arg)
    }

    pub(crate) fn lengths_and_ids(&self) -> Option<TensorArg> {
        self.lengths_and_ids
            .clone()
            .map(CubeTensor::into_tensor_arg)
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = &CubeTensor> {
        self.mask.iter().chain(self.beside_mask())
    }

    /// What kernels read that have the mask as bits.
    pub(crate) fn beside_mask(&self) -> impl Iterator<Item = &CubeTensor> {
        [&self.bias, &self.lengths_and_ids].into_iter().flatten()
    }
}

/// The structure that kernels are compiled for.
pub(crate) fn structure(problem: &AttentionProblem) -> Structure {
    Structure {
        lengths: problem.kv_lengths,
        lengths_ahead: false,
        segments: problem.segments,
        mask: problem.mask.is_some(),
    }
}

pub(crate) fn score_kind(problem: &AttentionProblem) -> ScoreKind {
    ScoreKind {
        softcap: problem.softcap.is_some(),
        wide_softcap: softcap::is_wide(problem.softcap),
        bias: problem.bias.is_some(),
    }
}

pub(crate) fn score_arguments(problem: &AttentionProblem) -> ScoreArgumentsLaunch {
    ScoreArgumentsLaunch::new(
        problem.scale as f32,
        problem.softcap.unwrap_or(1.0) as f32,
        f32::NEG_INFINITY,
    )
}

/// The launch's cubes by tile, split, head and sequence, `together` heads at a time.
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
