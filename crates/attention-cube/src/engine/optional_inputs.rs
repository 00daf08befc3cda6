//! The optional inputs of an attention call (mask, bias, lengths, segment ids), in the form in which kernels read them.

use crate::auxiliary::lengths::{Blocks, BoundsOffsets, prepare};
#[cfg(feature = "cuda")]
use crate::kernel_args::is_in_vectors;
use crate::kernel_args::{dropout_arguments, score_arguments};
use crate::math::score::ScoringLaunch;
use crate::math::score_mod::kernel::{KernelTableLaunch, KernelTablesLaunch};
use crate::problem::AttentionProblem;
use crate::types::tensors::AttentionInputs;
use burn::backend::{
    cubecl::dtype_to_storage_type,
    ops::{BoolTensorOps, FloatTensorOps},
};
use burn::tensor::{DType, Shape};
use burn_cubecl::{CubeBackend, cubecl, tensor::CubeTensor};
#[cfg(feature = "cuda")]
use cube_kit::nvidia::Half;
use cubecl::ir::ElemType;
use cubecl::prelude::TensorArg;
use cubecl::prelude::{Float, Numeric};

/// The mask, the bias, and one buffer of sequence lengths and segment ids. Kernels are generic over the element types of mask
/// and bias. `mask_element` and `bias_element` are therefore set even without a mask or a bias.
pub(crate) struct OptionalInputs {
    pub mask: Option<CubeTensor>,
    pub bias: Option<CubeTensor>,
    pub lengths_and_ids: Option<CubeTensor>,
    /// The table that the user's score mod reads.
    pub score_table: Option<CubeTensor>,
    /// The table that the user's mask mod reads.
    pub mask_table: Option<CubeTensor>,
    pub mask_element: ElemType,
    pub bias_element: ElemType,
}

impl OptionalInputs {
    /// Prepares the optional inputs for kernels with the given block sizes. For each kernel, also returns the offsets
    /// of the sequence lengths and segment bounds in `lengths_and_ids`.
    pub(crate) fn new(
        inputs: &AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
        blocks: &[Blocks],
    ) -> (Self, Vec<BoundsOffsets>) {
        let (lengths_and_ids, offsets) = prepare(inputs, problem, blocks);
        // Expand the bias to `[batch, q_heads, q_len, kv_len]`, and the mask to one element per score or per block. The
        // expansion does not copy them.
        let scores = Shape::new([
            problem.batch,
            problem.q_heads,
            problem.q_len,
            problem.kv_len,
        ]);
        let mask = inputs.mask.as_option();
        let [queries, keys] = problem.mask_block;
        let elements = [
            problem.batch,
            problem.q_heads,
            problem.q_len.div_ceil(queries),
            problem.kv_len.div_ceil(keys),
        ];
        let mask = mask.map(|mask| CubeBackend::bool_expand(mask.clone(), Shape::new(elements)));
        let bias = inputs.bias.as_option();
        let bias = bias.map(|bias| CubeBackend::float_expand(bias.clone(), scores));
        let element = |tensor: &Option<CubeTensor>, absent| {
            dtype_to_storage_type(tensor.as_ref().map_or(absent, |tensor| tensor.dtype))
        };
        let optional_inputs = Self {
            mask_element: element(&mask, DType::U32),
            bias_element: element(&bias, DType::F32),
            mask,
            bias,
            lengths_and_ids,
            score_table: inputs.score_table.clone().into_option(),
            mask_table: inputs.mask_table.clone().into_option(),
        };
        (optional_inputs, offsets)
    }

    /// True if the bias has only one element per query head. This element is added to all scores of the head.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_bias_of_head(&self) -> bool {
        let strides = self.bias.as_ref().map(|bias| &bias.meta.strides()[2..]);
        strides.is_some_and(|strides| strides == [0, 0])
    }

    /// Returns the half precision type of the bias, or `None` if the bias is f32 or absent.
    #[cfg(feature = "cuda")]
    pub(crate) fn half_of_bias(&self) -> Option<Half> {
        self.bias.as_ref().and_then(|bias| Half::of(bias.dtype))
    }

    /// Returns the half-precision type of the bias if kernels can prefetch two adjacent bias elements as one 32-bit
    /// word. Otherwise returns `None`.
    #[cfg(feature = "cuda")]
    pub(crate) fn half_of_bias_by_twos(&self) -> Option<Half> {
        self.half_of_bias()
            .filter(|_| bias_vector(self.bias.as_ref()) == 2)
    }

    /// Builds the kernel argument with which a kernel turns `q·k` into scores and hides keys. The kernel reads one mask
    /// element per score. `offsets` locates the sequence lengths and segment bounds in `lengths_and_ids`.
    pub(crate) fn scoring<M: Numeric, F: Float>(
        &self,
        offsets: BoundsOffsets,
        problem: &AttentionProblem,
    ) -> ScoringLaunch<M, F> {
        ScoringLaunch::new(
            offsets.seq_lens(problem),
            self.lengths_and_ids().into(),
            self.mask().into(),
            self.bias().into(),
            score_arguments(problem),
            dropout_arguments(problem).into(),
            self.tables(),
        )
    }

    /// Builds the kernel argument that holds the tables of the score mod and the mask mod.
    pub(crate) fn tables(&self) -> KernelTablesLaunch {
        let table = |table: &Option<CubeTensor>| {
            let table = table.clone().map(CubeTensor::into_tensor_arg);
            KernelTableLaunch::new(table.into())
        };
        KernelTablesLaunch::new(table(&self.score_table), table(&self.mask_table))
    }

    fn mask(&self) -> Option<TensorArg> {
        self.mask.clone().map(CubeTensor::into_tensor_arg)
    }

    fn bias(&self) -> Option<TensorArg> {
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

    /// Returns all optional tensors except the mask: the bias, the lengths and segment ids, and the tables of score mod
    /// and mask mod. A kernel that reads the mask as packed bits takes these tensors and, in place of the mask, a
    /// packed mask.
    pub(crate) fn beside_mask(&self) -> impl Iterator<Item = &CubeTensor> {
        let beside_mask = [
            &self.bias,
            &self.lengths_and_ids,
            &self.score_table,
            &self.mask_table,
        ];
        beside_mask.into_iter().flatten()
    }
}

/// Returns the number of bias elements per load: 2 if every row can be read in vectors of two elements, else 1.
#[cfg(feature = "cuda")]
pub(crate) fn bias_vector(bias: Option<&CubeTensor>) -> usize {
    match bias {
        Some(bias) if is_in_vectors(bias, 2) => 2,
        _ => 1,
    }
}
