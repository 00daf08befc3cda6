//! Launches the backward: the queries' terms, then a kernel for each side, or two for that of keys.

use crate::AttentionProblem;
use crate::arguments::{grid, is_in_vectors, score_arguments};
use crate::backend::{AttentionGradients, AttentionInputs, AttentionSaved};
use crate::division::HeldTiles;
use crate::engine::mma::backward::split_d::backward_split_d;
use crate::engine::mma::backward::split_m::backward_split_m;
use crate::engine::mma::plan::{BackwardPlan, GradientTiles};
use crate::fragment::FragmentKind;
use crate::fragment::bias::BiasReads;
use crate::fragment::launch::{fragment_kind, gradients};
use crate::fragment::work_tile::TileKind;
use crate::math::side::Side;
use crate::passes::backward::BackwardPass;
use crate::passes::lengths::Places;
use crate::passes::mask_bits::launch::PackedMask;
use crate::select::BackwardRequest;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

pub(crate) fn backward(
    inputs: AttentionInputs<CubeBackend>,
    saved: AttentionSaved<CubeBackend>,
    problem: &AttentionProblem,
    plan: BackwardPlan,
    request: BackwardRequest,
) -> AttentionGradients<CubeBackend> {
    let launch = |pass: &BackwardPass, tiles, places, mask, together| {
        Gradient {
            pass,
            tiles,
            places,
            mask,
            together,
        }
        .launch()
    };
    gradients(inputs, saved, problem, plan, request, launch)
}

/// One kernel's launch.
struct Gradient<'a> {
    pass: &'a BackwardPass<'a>,
    tiles: GradientTiles,
    places: Places,
    mask: PackedMask,
    together: usize,
}

impl Gradient<'_> {
    /// The gradients of what it holds: of dots and of values, as far as it sums them.
    fn launch(&self) -> [Option<CubeTensor>; 2] {
        let BackwardPass {
            inputs,
            output_gradient,
            rows: terms,
            extras,
            problem,
            ..
        } = self.pass;
        let client = terms.client.clone();
        let tiles = self.tiles;
        let (side, sums) = (tiles.side(), tiles.sums());
        let (stationary_dots, stationary_values, dots, values) = match side {
            Side::Queries => (&inputs.query, output_gradient, &inputs.key, &inputs.value),
            Side::Keys => (&inputs.key, &inputs.value, &inputs.query, output_gradient),
        };
        let gradient = |wanted: bool, of: &CubeTensor| {
            wanted.then(|| empty(terms, of.meta.shape().clone(), problem.dtype))
        };
        let dot_gradient = gradient(sums.has_dots(), stationary_dots);
        let value_gradient = gradient(sums.has_values(), stationary_values);
        // Where there is none, there must be some argument.
        let [dot_target, value_target] = [
            (&dot_gradient, stationary_dots),
            (&value_gradient, stationary_values),
        ]
        .map(|(gradient, held)| gradient.clone().unwrap_or_else(|| held.clone()));

        let (length, heads) = match side {
            Side::Queries => (problem.q_len, problem.q_heads),
            Side::Keys => (problem.kv_len, problem.kv_heads),
        };
        let (cubes, grid) = grid(
            length.div_ceil(tiles.rows()),
            1,
            heads,
            problem.batch,
            self.together,
        );
        let bias = extras.bias.clone().map(|bias| match side {
            Side::Queries => bias,
            Side::Keys => CubeBackend::float_swap_dims(bias, 2, 3),
        });
        let kind = TileKind {
            fragment: FragmentKind {
                bias_reads: match extras.has_bias_of_head() {
                    true => BiasReads::OnceAHead,
                    false => BiasReads::There,
                },
                ..fragment_kind(problem, side)
            },
            heads: 1,
            split: false,
        };
        let pairs = |width: usize| width.is_multiple_of(2);
        let vector = match pairs(problem.head_dim) && pairs(problem.value_dim) {
            true => 2,
            false => 1,
        };
        let bias_vector = match &bias {
            Some(bias) if is_in_vectors(bias, 2) => 2,
            _ => 1,
        };
        let addresses = address_type(
            [
                stationary_dots,
                stationary_values,
                dots,
                values,
                &dot_target,
                &value_target,
                terms,
            ]
            .into_iter()
            .chain(&self.mask.bits)
            .chain(extras.beside_mask()),
        );
        macro_rules! launch {
            ($kernel:ident, $tiles:expr) => {
                // SAFETY: copies and everything else stay inside the shapes that the kernel was given; what stands for a gradient
                // that is not summed is not written.
                unsafe {
                    $kernel::launch_unchecked(
                        &client,
                        cube_count(&client, cubes),
                        CubeDim::new_1d(tiles.units() as u32),
                        addresses,
                        BackwardPass::arg(stationary_dots),
                        BackwardPass::arg(stationary_values),
                        BackwardPass::arg(dots),
                        BackwardPass::arg(values),
                        BackwardPass::arg(terms),
                        self.mask.argument().into(),
                        bias.map(CubeTensor::into_tensor_arg).into(),
                        extras.lengths_and_ids().into(),
                        dot_target.into_tensor_arg(),
                        value_target.into_tensor_arg(),
                        grid,
                        self.places.extent(problem),
                        score_arguments(problem),
                        self.mask.places(),
                        problem.group() as u32,
                        $tiles,
                        kind,
                        dtype_to_storage_type(problem.dtype),
                        extras.bias_element,
                        vector,
                        bias_vector,
                        $tiles.vectors(),
                    )
                }
            };
        }
        match tiles {
            GradientTiles::SplitM(tiles) => launch!(backward_split_m, tiles),
            GradientTiles::SplitD(tiles) => launch!(backward_split_d, tiles),
        }
        [dot_gradient, value_gradient]
    }
}
