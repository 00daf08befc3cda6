//! Host code that the engines share to launch a gradient kernel: operands, gradients, launch grid, bias and element
//! types.

use super::FragmentKind;
use super::bias::BiasReads;
use super::launch::{GradientDivision, fragment_kind, scoring};
use super::scoring::{GradientGridLaunch, ScoringLaunch};
use super::tile_scheduler::TileKind;
use crate::auxiliary::lengths::BoundsOffsets;
use crate::auxiliary::mask_bits::launch::PackedMask;
use crate::engine::backward_pass::BackwardPass;
use crate::engine::optional_inputs::bias_vector;
use crate::engine::tiling::BackwardTiles;
use crate::kernel_args::grid;
use crate::math::schedule::GridLaunch;
use crate::math::side::{Side, Sums};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::address_type;
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::{Float, Size};

/// The inputs for the launch of one gradient kernel.
pub(crate) struct GradientLaunch<'a, T> {
    pub pass: &'a BackwardPass<'a>,
    pub tiles: T,
    pub offsets: BoundsOffsets,
    pub mask: PackedMask,
    pub division: GradientDivision,
}

/// The arguments that a gradient kernel takes in every engine.
pub(crate) struct GradientArguments<'a> {
    /// The stationary operand of S = Q Kᵀ: Q for a tile of queries, K for a tile of keys. The CTA keeps a tile of this
    /// operand's rows.
    pub stationary_qk: &'a CubeTensor,
    /// The stationary operand of dP = dO Vᵀ: dO for a tile of queries, V for a tile of keys. The CTA keeps a tile of
    /// this operand's rows.
    pub stationary_v_do: &'a CubeTensor,
    /// The streamed operand of S = Q Kᵀ: K for a tile of queries, Q for a tile of keys. The CTA streams this operand's
    /// rows in blocks.
    pub q_or_k: &'a CubeTensor,
    /// The streamed operand of dP = dO Vᵀ: V for a tile of queries, dO for a tile of keys. The CTA streams this
    /// operand's rows in blocks.
    pub v_or_do: &'a CubeTensor,
    /// The LSE and delta of each query, as `[batch, q_heads, 5, padded q_len]`.
    pub lse_delta: &'a CubeTensor,
    /// The gradients that the kernel writes: first the gradient of Q or K, then the gradient of V. A gradient that the
    /// kernel does not compute is `None`.
    pub gradients: [Option<CubeTensor>; 2],
    /// The tensor for the gradient of Q or K. If the kernel does not compute this gradient, the launch passes
    /// `stationary_qk` in its place, because the kernel's signature requires a tensor.
    pub qk_target: CubeTensor,
    /// The tensor for the gradient of V. If the kernel does not compute this gradient, the launch passes
    /// `stationary_v_do` in its place, because the kernel's signature requires a tensor.
    pub value_target: CubeTensor,
    /// The bias. The bias is transposed if the tile's rows are keys and the kernel loads a separate bias for each
    /// score.
    pub bias: Option<CubeTensor>,
    pub cubes: usize,
    pub grid: GridLaunch,
    pub kind: TileKind,
    /// The element types of the operands, of the gradients, and of the bias.
    pub elements: [ElemType; 3],
    /// The number of elements per access to a gradient, and the number of elements per load of the bias.
    pub vectors: [usize; 2],
}

impl<'a, T: BackwardTiles> GradientLaunch<'a, T> {
    /// Returns the arguments of a kernel, and allocates the gradients that `sums` selects. `bias_reads` is the way in
    /// which the kernel loads the bias.
    pub(crate) fn arguments(&self, sums: Sums, bias_reads: BiasReads) -> GradientArguments<'a> {
        let pass = self.pass;
        let (inputs, problem) = (&pass.inputs, pass.problem);
        let (lse_delta, output_gradient) = (&pass.rows, &pass.output_gradient);
        let side = self.tiles.side();
        let (stationary_qk, stationary_v_do, q_or_k, v_or_do) = match side {
            Side::Queries => (&inputs.query, output_gradient, &inputs.key, &inputs.value),
            Side::Keys => (&inputs.key, &inputs.value, &inputs.query, output_gradient),
        };
        let (length, heads) = match side {
            Side::Queries => (problem.q_len, problem.q_heads),
            Side::Keys => (problem.kv_len, problem.kv_heads),
        };
        let GradientDivision { splits, together } = self.division;
        let gradient =
            |wanted: bool, of: &CubeTensor| wanted.then(|| self.division.target(lse_delta, of));
        let gradients = [
            gradient(sums.has_q_or_k(), stationary_qk),
            gradient(sums.has_values(), stationary_v_do),
        ];
        let target = |gradient: &Option<CubeTensor>, operand: &CubeTensor| {
            gradient.clone().unwrap_or_else(|| operand.clone())
        };
        let (cubes, grid) = grid(
            length.div_ceil(self.tiles.rows()),
            splits,
            heads,
            problem.batch,
            together,
        );
        let is_ahead = matches!(bias_reads, BiasReads::Ahead(_));
        let bias = pass.optional_inputs.bias.clone();
        let bias = bias.map(|bias| match side {
            Side::Keys if !is_ahead => CubeBackend::float_swap_dims(bias, 2, 3),
            _ => bias,
        });
        let is_even = problem.head_dim.is_multiple_of(2) && problem.value_dim.is_multiple_of(2);
        GradientArguments {
            qk_target: target(&gradients[0], stationary_qk),
            value_target: target(&gradients[1], stationary_v_do),
            stationary_qk,
            stationary_v_do,
            q_or_k,
            v_or_do,
            lse_delta,
            gradients,
            cubes,
            grid,
            kind: TileKind {
                fragment: FragmentKind {
                    bias_reads,
                    ..fragment_kind(problem, side)
                },
                heads: 1,
                split: splits > 1,
                page_len: 0,
            },
            elements: [
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(self.division.dtype(problem.dtype)),
                pass.optional_inputs.bias_element,
            ],
            vectors: [if is_even { 2 } else { 1 }, bias_vector(bias.as_ref())],
            bias,
        }
    }

    /// Returns the kernel argument `Scoring`: the masking inputs, `bias`, the scale and the softcap.
    pub(crate) fn scoring<F: Float, NB: Size>(
        &self,
        bias: Option<CubeTensor>,
    ) -> ScoringLaunch<F, NB> {
        let pass = self.pass;
        scoring(
            pass.problem,
            self.offsets,
            &self.mask,
            bias,
            &pass.optional_inputs,
        )
    }

    /// Returns the kernel argument that holds the launch grid of the tiles, and the GQA group size.
    pub(crate) fn grid(&self, grid: GridLaunch) -> GradientGridLaunch {
        GradientGridLaunch::new(grid, self.pass.problem.group() as u32)
    }

    /// Returns an integer type that can index each of these tensors: the mask, the bias, the lengths and all of `tensors`.
    pub(crate) fn addresses<'t>(
        &'t self,
        tensors: impl IntoIterator<Item = &'t CubeTensor>,
    ) -> AddressType {
        address_type(
            tensors
                .into_iter()
                .chain(&self.mask.bits)
                .chain(self.pass.optional_inputs.beside_mask()),
        )
    }

    /// Returns the gradient of Q or K, and the gradient of V. If the work is split, the function sums the partial gradients.
    /// A gradient that the kernel does not compute is `None`.
    pub(crate) fn results(
        &self,
        [qk_gradient, value_gradient]: [Option<CubeTensor>; 2],
        [qk, value]: [&CubeTensor; 2],
    ) -> [Option<CubeTensor>; 2] {
        let sum = |gradient: Option<CubeTensor>, of: &CubeTensor| {
            gradient.map(|gradient| self.division.sum(gradient, of))
        };
        [sum(qk_gradient, qk), sum(value_gradient, value)]
    }
}
