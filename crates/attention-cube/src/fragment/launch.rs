//! What launches on fragments need, whatever engine they are of: a forward's tensors and numbers, and a backward's kernels one after
//! the other.

use super::FragmentKind;
use super::bias::BiasReads;
use super::work_tile::TileKind;
use crate::AttentionProblem;
use crate::arguments::{Extras, grid, is_in_vectors, score_kind, structure};
use crate::backend::{AttentionGradients, AttentionInputs, AttentionOutput, AttentionSaved};
use crate::division::{BackwardPlan, HeldTiles};
use crate::math::schedule::GridLaunch;
use crate::math::side::Side;
use crate::math::visibility::ExtentLaunch;
use crate::passes::backward::{BackwardPass, Gradients, blocks_of_bias};
use crate::passes::combine::join;
use crate::passes::delta::form::{LogsumexpForm, is_raw};
use crate::passes::lengths::{Blocks, Places};
use crate::passes::mask_bits::launch::{PackedMask, pack};
use crate::select::BackwardRequest;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::hopper::Half;
use cube_kit::launch::{address_type, empty};
use cubecl::ir::{AddressType, ElemType};
use cubecl::prelude::TensorArg;
use std::fmt::Debug;

/// What kernels are compiled for whose fragments have rows of this side.
pub(crate) fn fragment_kind(problem: &AttentionProblem, side: Side) -> FragmentKind {
    let score = score_kind(problem);
    FragmentKind {
        side,
        structure: structure(problem),
        score,
        raw: is_raw(problem),
        has_slope: score.softcap,
        bias_reads: BiasReads::There,
    }
}

/// How a plan divides a forward.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Division {
    /// Queries of a tile, and keys of a block.
    pub rows: usize,
    /// See `rows`.
    pub keys: usize,
    /// Query heads that share a tile.
    pub heads: usize,
    /// Parts of the keys.
    pub splits: usize,
    /// Heads whose tiles alternate.
    pub together: usize,
}

/// Where a forward's kernel has biases before the scores are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BiasesAhead {
    /// Nowhere: there are no registers for them.
    Never,
    /// Where they lie by twos.
    ByTwos,
    /// From tiles that the copy engine brings.
    ByTma,
}

/// A forward's tensors and numbers.
pub(crate) struct ForwardPass {
    pub extras: Extras,
    pub mask: PackedMask,
    pub output: CubeTensor,
    pub logsumexp: CubeTensor,
    pub kind: TileKind,
    /// Tiles of queries a head.
    pub tiles: usize,
    /// Heads that tiles are counted in.
    pub tile_heads: usize,
    /// Tiles of all heads and sequences, and their parts.
    pub work_tiles: usize,
    pub sink_element: ElemType,
    pub bias_vector: usize,
    pub output_vector: usize,
    /// From the scores that the kernel measures to powers of two.
    pub power: f32,
    places: Places,
    sinks: Option<CubeTensor>,
    division: Division,
}

impl ForwardPass {
    pub(crate) fn new(
        inputs: &AttentionInputs<CubeBackend>,
        problem: &AttentionProblem,
        division: Division,
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
        let Division {
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
            held: Side::Queries,
        };
        let (extras, places) = Extras::new(inputs, problem, &[blocks]);
        let tile_rows = (!shares_tile).then_some(rows);
        let mask = pack(inputs, problem, Side::Queries, tile_rows, keys);
        let sinks = inputs.sinks.as_option().cloned();
        let sink_element = sinks.as_ref().map_or(extras.bias_element, |sinks| {
            dtype_to_storage_type(sinks.dtype)
        });
        // The parts lie one after the other, each with all sequences.
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
        // First all references, then all logarithms of the sums by these.
        let logsumexp = empty(&inputs.query, [2 * parts, q_heads, q_len], DType::F32);
        let (tiles, tile_heads) = match shares_tile {
            true => (problem.group().div_ceil(heads), kv_heads),
            false => (q_len.div_ceil(rows), q_heads),
        };
        let bias_vector = match &extras.bias {
            Some(bias) if is_in_vectors(bias, 2) => 2,
            _ => 1,
        };
        let half_of_bias = extras
            .bias
            .as_ref()
            .and_then(|bias| Half::of(bias.dtype))
            .filter(|_| match ahead {
                BiasesAhead::Never => false,
                BiasesAhead::ByTwos => bias_vector == 2,
                BiasesAhead::ByTma => true,
            });
        let bias_reads = match half_of_bias {
            Some(half) => BiasReads::Ahead(half),
            None if extras.has_bias_of_head() && !shares_tile => BiasReads::OnceAHead,
            None => BiasReads::There,
        };
        let fragment = FragmentKind {
            bias_reads,
            ..fragment_kind(problem, Side::Queries)
        };
        let power = match fragment.raw {
            true => problem.scale * std::f64::consts::LOG2_E,
            false => std::f64::consts::LOG2_E,
        };
        Self {
            extras,
            mask,
            output,
            logsumexp,
            kind: TileKind {
                fragment,
                heads,
                split: splits > 1,
            },
            tiles,
            tile_heads,
            work_tiles: tiles * splits * tile_heads * batch,
            sink_element,
            bias_vector,
            output_vector: if value_dim.is_multiple_of(2) { 2 } else { 1 },
            power: power as f32,
            places: places[0],
            sinks,
            division,
        }
    }

    /// The work tiles as the kernel numbers them.
    pub(crate) fn grid(&self, problem: &AttentionProblem) -> GridLaunch {
        let Division {
            splits, together, ..
        } = self.division;
        grid(self.tiles, splits, self.tile_heads, problem.batch, together).1
    }

    pub(crate) fn extent(&self, problem: &AttentionProblem) -> ExtentLaunch {
        self.places.extent(problem)
    }

    /// The sinks, where the kernel has them join the sums.
    pub(crate) fn sinks(&self) -> Option<TensorArg> {
        let own = self.sinks.clone().filter(|_| !self.kind.split);
        own.map(CubeTensor::into_tensor_arg)
    }

    /// The width of addresses into these, and into `operands`.
    pub(crate) fn addresses<'a>(
        &'a self,
        operands: impl IntoIterator<Item = &'a CubeTensor>,
    ) -> AddressType {
        address_type(
            [&self.output, &self.logsumexp]
                .into_iter()
                .chain(&self.mask.bits)
                .chain(self.extras.beside_mask())
                .chain(operands),
        )
    }

    /// The forward's results, put together where the keys were split.
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
            join(output, logsumexp, self.sinks, problem, splits, vector)
        } else {
            AttentionOutput { output, logsumexp }
        }
    }
}

/// The gradients asked for: of each kernel of the plan what `launch` gives of dots and of values, and of the bias and the sinks.
pub(crate) fn gradients<T: HeldTiles + Debug>(
    inputs: AttentionInputs<CubeBackend>,
    saved: AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    plan: BackwardPlan<T>,
    request: BackwardRequest,
    launch: impl Fn(&BackwardPass, T, Places, PackedMask, usize) -> [Option<CubeTensor>; 2],
) -> AttentionGradients<CubeBackend> {
    let kernels = plan.kernels(request);
    log::debug!("attention backward: {kernels:?} for {request:?}");
    let of_kernels = kernels.iter().map(blocks_of);
    let of_bias = blocks_of_bias(plan.bias, request);
    let blocks: Vec<_> = of_kernels.chain(of_bias).collect();
    let (extras, places) = Extras::new(&inputs, problem, &blocks);
    let pass = BackwardPass::new(
        inputs,
        saved,
        extras,
        problem,
        plan.vector,
        LogsumexpForm::of_problem(problem),
    );

    let mut gradients = Gradients::default();
    // Kernels with the same blocks share their mask.
    let mut last_mask: Option<(Blocks, PackedMask)> = None;
    for (tiles, places) in kernels.into_iter().zip(&places) {
        let side = tiles.side();
        let blocks = blocks_of(&tiles);
        let mask = match last_mask.take() {
            Some((of, mask)) if of == blocks => mask,
            _ => pack(
                &pass.inputs,
                problem,
                side,
                Some(tiles.rows()),
                tiles.columns(),
            ),
        };
        last_mask = Some((blocks, mask.clone()));
        let together = match side {
            Side::Queries => plan.queries_together,
            Side::Keys => plan.keys_together,
        };
        let [dots, values] = launch(&pass, tiles, *places, mask, together);
        match side {
            Side::Queries => gradients.query = dots,
            Side::Keys => {
                gradients.key = dots.or(gradients.key);
                gradients.value = values.or(gradients.value);
            }
        }
    }
    pass.with_rest(gradients, plan.bias, places.last(), request)
}

fn blocks_of<T: HeldTiles>(tiles: &T) -> Blocks {
    match tiles.side() {
        Side::Queries => Blocks {
            queries: tiles.rows(),
            keys: tiles.columns(),
            held: Side::Queries,
        },
        Side::Keys => Blocks {
            queries: tiles.columns(),
            keys: tiles.rows(),
            held: Side::Keys,
        },
    }
}
