//! Host code that the launches of all tensor-core engines share.

use super::FragmentKind;
use super::bias::BiasReads;
use super::tile_scheduler::TileKind;
use crate::auxiliary::combine::combine_splits;
use crate::auxiliary::lengths::{Blocks, BoundsOffsets};
use crate::auxiliary::mask_bits::launch::{PackedMask, pack};
use crate::auxiliary::mask_bits::plan::MaskTile;
use crate::auxiliary::reduce::sum_splits;
use crate::engine::backward_pass::{BackwardPass, Gradients, RestPlans};
use crate::engine::optional_inputs::{OptionalInputs, bias_vector};
use crate::engine::tensor_core::common::scoring::{MaskingLaunch, ScoringLaunch};
use crate::engine::tensor_core::common::tile_scheduler::TileSchedulerLaunch;
use crate::engine::tiling::{BackwardPlan, BackwardTiles};
use crate::kernel_args::{dropout_arguments, score_arguments};
use crate::kernel_args::{grid, score_kind, structure};
use crate::math::lse_form::{LogsumexpForm, is_raw};
use crate::math::schedule::GridLaunch;
use crate::math::schedule::ScheduleLaunch;
use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::types::request::BackwardRequest;
use crate::types::tensors::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, empty};
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::TensorArg;
use cubecl::prelude::{Float, Size};
use std::fmt::Debug;

/// Returns the compile-time settings of a kernel. `side` tells whether the rows of the kernel's fragments are queries
/// or keys.
pub(crate) fn fragment_kind(problem: &AttentionProblem, side: Side) -> FragmentKind {
    let score = score_kind(problem);
    FragmentKind {
        side,
        structure: structure(problem),
        score,
        raw: is_raw(problem),
        has_slope: score.has_slope(),
        bias_reads: BiasReads::There,
    }
}

/// The tile sizes and splits that a plan chooses for a forward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardTiling {
    /// The number of queries in a tile.
    pub rows: usize,
    /// The number of keys in a block.
    pub keys: usize,
    /// The number of query heads that share a tile. The number is 1 if a tile has rows of one head only.
    pub heads: usize,
    /// The number of splits of the keys (split-KV).
    pub splits: usize,
    /// The number of heads whose tiles the launch order interleaves. With interleaving, the longest tiles (those with
    /// the most blocks) of all these heads start first. Heads of different sequences count separately. Without a causal
    /// mask, segments and key intervals, the tiles are about equally long, and the number is 1. With any of these
    /// three, the plan limits the number so that the operands of the interleaved heads stay in the L2 cache.
    pub together: usize,
}

/// The ways in which a forward kernel can load biases before the dot products `q·k` (S) are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BiasesAhead {
    /// The kernel has no registers to spare, so it loads biases only after the dot products `q·k` (S) are ready.
    Never,
    /// Threads load two half-precision biases as one 32-bit word, if the layout of the bias allows it.
    ByTwos,
    /// TMA copies tiles of biases to shared memory.
    ByTma,
}

/// The tensors and scalar arguments of a forward.
pub(crate) struct ForwardPass {
    pub optional_inputs: OptionalInputs,
    pub mask: PackedMask,
    pub output: CubeTensor,
    pub logsumexp: CubeTensor,
    pub kind: TileKind,
    /// The number of tiles of queries per head, or per KV head if query heads share a tile.
    pub tiles: usize,
    /// The number of heads per sequence in the launch grid: KV heads if query heads share a tile, else query heads.
    pub tile_heads: usize,
    /// The number of work tiles in the launch: tiles per head × splits × heads × sequences.
    pub work_tiles: usize,
    pub sink_element: ElemType,
    pub bias_vector: usize,
    pub output_vector: usize,
    /// The factor that converts the kernel's scores to log2 units. If the kernel keeps unscaled dot products, the factor
    /// includes the problem's scale.
    pub scale_log2: f32,
    offsets: BoundsOffsets,
    sinks: Option<CubeTensor>,
    division: ForwardTiling,
}

impl ForwardPass {
    pub(crate) fn new(
        inputs: &AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
        division: ForwardTiling,
        ahead: BiasesAhead,
    ) -> Self {
        let AttentionProblem {
            batch,
            q_heads,
            kv_heads,
            q_len,
            value_dim,
            ..
        } = *problem;
        let ForwardTiling {
            rows,
            keys,
            heads,
            splits,
            ..
        } = division;
        let shares_tile = heads > 1;
        let blocks = Blocks {
            queries: if shares_tile { q_len } else { rows },
            keys,
            stationary_side: Side::Queries,
            longest_first: !shares_tile && splits == 1,
        };
        let (optional_inputs, offsets) = OptionalInputs::new(inputs, problem, &[blocks]);
        let tile = match shares_tile {
            true => MaskTile::Heads(heads),
            false => MaskTile::Rows(rows),
        };
        let mask = pack(inputs, problem, Side::Queries, tile, keys);
        let sinks = inputs.sinks.as_option().cloned();
        let sink_element = sinks
            .as_ref()
            .map_or(optional_inputs.bias_element, |sinks| {
                dtype_to_storage_type(sinks.dtype)
            });
        // The first dimension of the output has `splits · batch` entries: all sequences of split 0, then those of split
        // 1, and so on.
        let parts = splits * batch;
        let output = empty(
            &inputs.query,
            [parts, q_heads, q_len, value_dim],
            if splits > 1 {
                DType::F32
            } else {
                problem.dtype
            },
        );
        // The first half of the LSE tensor holds the row maxima that the softmax subtracted. The second half holds the
        // natural logarithms of row_sum after this subtraction.
        let logsumexp = empty(&inputs.query, [2 * parts, q_heads, q_len], DType::F32);
        let (tiles, tile_heads) = match shares_tile {
            true => (problem.group().div_ceil(heads), kv_heads),
            false => (q_len.div_ceil(rows), q_heads),
        };
        let bias_vector = bias_vector(optional_inputs.bias.as_ref());
        let half_of_bias = match ahead {
            // If a kernel loads the bias early (before `q·k` is ready), the kernel adds the bias before the score mod runs. A
            // score mod must not see the bias, so a kernel with a score mod loads the bias later.
            _ if problem.has_code() => None,
            BiasesAhead::Never => None,
            BiasesAhead::ByTwos => optional_inputs.half_of_bias_by_twos(),
            BiasesAhead::ByTma => optional_inputs.half_of_bias(),
        };
        let bias_reads = match half_of_bias {
            Some(half) => BiasReads::Ahead(half),
            None if optional_inputs.has_bias_of_head() && !shares_tile => BiasReads::OnceAHead,
            None => BiasReads::There,
        };
        let fragment = FragmentKind {
            bias_reads,
            ..fragment_kind(problem, Side::Queries)
        };
        let scale_log2 = match fragment.raw {
            true => problem.scale * std::f64::consts::LOG2_E,
            false => std::f64::consts::LOG2_E,
        };
        Self {
            optional_inputs,
            mask,
            output,
            logsumexp,
            kind: TileKind {
                fragment,
                heads,
                split: splits > 1,
                page_len: problem.page_len.unwrap_or(0),
            },
            tiles,
            tile_heads,
            work_tiles: tiles * splits * tile_heads * batch,
            sink_element,
            bias_vector,
            output_vector: if value_dim.is_multiple_of(2) { 2 } else { 1 },
            scale_log2: scale_log2 as f32,
            offsets: offsets[0],
            sinks,
            division,
        }
    }

    /// Returns the launch grid, which defines the order in which the work tiles start.
    pub(crate) fn grid(&self, problem: &AttentionProblem) -> GridLaunch {
        let ForwardTiling {
            splits, together, ..
        } = self.division;
        grid(self.tiles, splits, self.tile_heads, problem.batch, together).1
    }

    /// Returns the kernel argument `Scoring`: the masking inputs, the bias, the scale and the softcap.
    pub(crate) fn scoring<F: Float, NB: Size>(
        &self,
        problem: &AttentionProblem,
    ) -> ScoringLaunch<F, NB> {
        let bias = self.optional_inputs.bias.clone();
        scoring(
            problem,
            self.offsets,
            &self.mask,
            bias,
            &self.optional_inputs,
        )
    }

    /// The element types of the operands, the output, the bias and the sinks, in this order.
    pub(crate) fn elements(&self, problem: &AttentionProblem) -> [ElemType; 4] {
        [
            dtype_to_storage_type(problem.dtype),
            dtype_to_storage_type(self.output.dtype),
            self.optional_inputs.bias_element,
            self.sink_element,
        ]
    }

    /// Returns vector sizes: first those of the output and of the bias, then those in `fragments`. `fragments` holds
    /// the vector sizes of the register fragments.
    pub(crate) fn sizes<const FRAGMENTS: usize, const SIZES: usize>(
        &self,
        fragments: [usize; FRAGMENTS],
    ) -> [usize; SIZES] {
        joined_sizes([self.output_vector, self.bias_vector], fragments)
    }

    /// Returns the kernel argument that holds the launch grid of the tiles, and the `schedule` that assigns tiles to
    /// CTAs.
    pub(crate) fn scheduler(
        &self,
        problem: &AttentionProblem,
        schedule: ScheduleLaunch,
    ) -> TileSchedulerLaunch {
        TileSchedulerLaunch::new(self.grid(problem), schedule, problem.group() as u32)
    }

    /// Returns the sinks that the forward kernel adds to row_sum, or `None`. With split-KV, the combine kernel adds the
    /// sinks instead.
    pub(crate) fn sinks(&self) -> Option<TensorArg> {
        let own = self.sinks.clone().filter(|_| !self.kind.split);
        own.map(CubeTensor::into_tensor_arg)
    }

    /// Returns an integer type that can index the forward's tensors and all of `operands`.
    pub(crate) fn addresses<'a>(
        &'a self,
        operands: impl IntoIterator<Item = &'a CubeTensor>,
    ) -> AddressType {
        address_type(
            [&self.output, &self.logsumexp]
                .into_iter()
                .chain(&self.mask.bits)
                .chain(self.optional_inputs.beside_mask())
                .chain(operands),
        )
    }

    /// Returns the output and the LSE. With split-KV, the function first combines the partial results of the splits.
    pub(crate) fn results(self, problem: &AttentionProblem) -> AttentionOutput<CubeBackend> {
        let Self {
            output, logsumexp, ..
        } = self;
        if self.kind.split {
            let vector = if problem.value_dim.is_multiple_of(4) {
                4
            } else {
                1
            };
            let splits = self.division.splits;
            combine_splits(output, logsumexp, self.sinks, problem, splits, vector)
        } else {
            AttentionOutput { output, logsumexp }
        }
    }
}

/// Concatenates two arrays of sizes into one array of `BOTH` = `FIRST` + `SECOND` sizes.
pub(crate) fn joined_sizes<const FIRST: usize, const SECOND: usize, const BOTH: usize>(
    first: [usize; FIRST],
    second: [usize; SECOND],
) -> [usize; BOTH] {
    const { assert!(FIRST + SECOND == BOTH) };
    std::array::from_fn(|index| match index < FIRST {
        true => first[index],
        false => second[index - FIRST],
    })
}

/// Returns the kernel argument `Scoring`: the masking inputs, `bias`, the scale and the softcap. `offsets` locates the
/// segment bounds in the tensor of lengths and segment ids.
pub(crate) fn scoring<F: Float, NB: Size>(
    problem: &AttentionProblem,
    offsets: BoundsOffsets,
    mask: &PackedMask,
    bias: Option<CubeTensor>,
    optional_inputs: &OptionalInputs,
) -> ScoringLaunch<F, NB> {
    let masking = MaskingLaunch::new(
        offsets.seq_lens(problem),
        optional_inputs.lengths_and_ids().into(),
        mask.argument().into(),
        mask.offsets(),
    );
    let bias = bias.map(CubeTensor::into_tensor_arg);
    ScoringLaunch::new(
        masking,
        bias.into(),
        score_arguments(problem),
        dropout_arguments(problem).into(),
        optional_inputs.tables(),
    )
}

/// The division of a backward kernel's work among CTAs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradientDivision {
    /// The number of splits. The CTAs of different splits process different blocks of the same tile.
    pub splits: usize,
    /// The number of heads whose tiles the launch order interleaves. With interleaving, the longest tiles (those with
    /// the most blocks) of all these heads start first. Heads of different sequences count separately. Without a causal
    /// mask, segments and key intervals, the tiles are about equally long, and the number is 1. With any of these
    /// three, the plan limits the number so that the operands of the interleaved heads stay in the L2 cache.
    pub together: usize,
}

impl GradientDivision {
    /// Returns the dtype of the gradient that a kernel writes: f32 for the partial sums of split work, or else `dtype`.
    pub(crate) fn dtype(&self, dtype: DType) -> DType {
        match self.splits {
            1 => dtype,
            _ => DType::F32,
        }
    }

    /// Allocates the tensor for the gradient with respect to `input`: `[splits · batch, heads, len, dim]`. The first
    /// dimension has the partial gradients of split 0, then those of split 1, and so on.
    pub(crate) fn target(&self, on: &CubeTensor, input: &CubeTensor) -> CubeTensor {
        let mut shape = input.meta.shape().clone();
        shape[0] *= self.splits;
        empty(on, shape, self.dtype(input.dtype))
    }

    /// Returns the gradient with respect to `input` from the kernel's output `written`. If the work is split, the function
    /// sums the partial gradients.
    pub(crate) fn sum(&self, written: CubeTensor, input: &CubeTensor) -> CubeTensor {
        if self.splits == 1 {
            return written;
        }
        sum_splits(&written, self.splits, input)
    }
}

/// Computes the requested gradients with respect to `inputs`.
///
/// The closure `launch` runs one kernel of the plan. The closure returns two gradients: the gradient of Q or K, and the
/// gradient of V. A gradient that the kernel does not compute is `None`. After all kernels, the function computes the
/// gradients of the bias, of the sinks and of a learned table.
pub(crate) fn gradients<T: BackwardTiles + Debug>(
    inputs: AttentionInputs<CubeBackend>,
    saved: AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    plan: BackwardPlan<T>,
    request: BackwardRequest,
    launch: impl Fn(
        &BackwardPass,
        T,
        BoundsOffsets,
        PackedMask,
        GradientDivision,
    ) -> [Option<CubeTensor>; 2],
) -> AttentionGradients<CubeBackend> {
    let kernels = plan.kernels(request);
    log::debug!("attention backward: {kernels:?} for {request:?}");
    let of_kernels = kernels.iter().map(blocks_of);
    let rest = RestPlans::new(plan.bias, plan.table, request);
    let blocks: Vec<_> = of_kernels.chain(rest.blocks()).collect();
    let (optional_inputs, offsets) = OptionalInputs::new(&inputs, problem, &blocks);
    let pass = BackwardPass::new(
        inputs,
        saved,
        optional_inputs,
        problem,
        plan.vector,
        LogsumexpForm::of_problem(problem),
    );

    let count = kernels.len();
    let mut gradients = Gradients::default();
    // Two consecutive kernels with the same block sizes use the same packed mask, so the loop keeps the last packed mask for
    // the next kernel.
    let mut last_mask: Option<(Blocks, PackedMask)> = None;
    for (tiles, offsets) in kernels.into_iter().zip(&offsets) {
        let side = tiles.side();
        let blocks = blocks_of(&tiles);
        let mask = match last_mask.take() {
            Some((of, mask)) if of == blocks => mask,
            _ => pack(
                &pass.inputs,
                problem,
                side,
                MaskTile::Rows(tiles.rows()),
                tiles.columns(),
            ),
        };
        last_mask = Some((blocks, mask.clone()));
        let together = match side {
            Side::Queries => plan.queries_together,
            Side::Keys => plan.keys_together,
        };
        let division = GradientDivision {
            splits: plan.splits_of(&tiles),
            together,
        };
        let [q_or_k, v_or_do] = launch(&pass, tiles, *offsets, mask, division);
        match side {
            Side::Queries => gradients.query = q_or_k,
            Side::Keys => {
                gradients.key = q_or_k.or(gradients.key);
                gradients.value = v_or_do.or(gradients.value);
            }
        }
    }
    pass.with_rest(gradients, rest, &offsets[count..], request)
}

fn blocks_of<T: BackwardTiles>(tiles: &T) -> Blocks {
    match tiles.side() {
        Side::Queries => Blocks {
            queries: tiles.rows(),
            keys: tiles.columns(),
            stationary_side: Side::Queries,
            longest_first: false,
        },
        Side::Keys => Blocks {
            queries: tiles.columns(),
            keys: tiles.rows(),
            stationary_side: Side::Keys,
            longest_first: false,
        },
    }
}
