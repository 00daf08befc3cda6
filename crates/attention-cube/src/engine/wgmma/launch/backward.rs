//! Launches the backward of the wgmma engine: the queries' terms, then a kernel for each side, or two for that of
//! keys.

use crate::AttentionProblem;
use crate::arguments::{grid, is_in_vectors, score_arguments};
use crate::backend::{AttentionGradients, AttentionInputs, AttentionSaved};
use crate::division::HeldTiles;
use crate::engine::wgmma::backward::copies::GradientStepsLaunch;
use crate::engine::wgmma::backward::split_d::backward_split_d;
use crate::engine::wgmma::backward::split_m::backward_split_m;
use crate::engine::wgmma::plan::{BackwardPlan, GradientSplitDTiles, GradientTiles, SplitDTiles};
use crate::fragment::FragmentKind;
use crate::fragment::bias::BiasReads;
use crate::fragment::launch::{fragment_kind, gradients};
use crate::fragment::work_tile::TileKind;
use crate::math::side::{Side, Sums};
use crate::passes::backward::BackwardPass;
use crate::passes::lengths::Places;
use crate::passes::mask_bits::launch::PackedMask;
use crate::select::BackwardRequest;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::tma::{is_single, map};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::{CubeDim, TensorMapArg, Tiled, TiledArgs};

pub(crate) fn launch(
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

/// How the copy engine sees the terms: the first `count` of `columns` queries are a box.
fn term_map(terms: &CubeTensor, count: usize, columns: usize) -> TensorMapArg<Tiled> {
    let args = TiledArgs {
        tile_size: Shape::new([1, 1, count, columns]),
    };
    TensorMapArg::new(
        args,
        terms.clone().into_tensor_arg(),
        dtype_to_storage_type(DType::F32),
    )
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
        let side = self.tiles.side();
        let sums = self.tiles.sums();
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
            length.div_ceil(self.tiles.rows()),
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
        let step = |tensor: &CubeTensor, dim| u32::from(!is_single(tensor, dim));
        let steps = GradientStepsLaunch::new(
            step(stationary_dots, 0),
            step(stationary_dots, 1),
            step(stationary_values, 0),
            step(stationary_values, 1),
            step(dots, 0),
            step(dots, 1),
            step(values, 0),
            step(values, 1),
        );
        let pairs = |width: usize| width.is_multiple_of(2);
        let vector = match pairs(problem.head_dim) && pairs(problem.value_dim) {
            true => 2,
            false => 1,
        };
        let bias_vector = match &bias {
            Some(bias) if is_in_vectors(bias, 2) => 2,
            _ => 1,
        };
        // A gradient that leaves without the copy engine has no map, and its rows may not be legal for one.
        let boxes = |boxed: bool, target: &CubeTensor| {
            map(
                if boxed { target } else { stationary_dots },
                [1, PRODUCT_ROWS],
                None,
            )
        };
        let addresses = address_type(
            [&dot_target, &value_target, terms]
                .into_iter()
                .chain(&self.mask.bits)
                .chain(extras.beside_mask()),
        );
        match self.tiles {
            // SAFETY: the copy engine stays inside the shapes of its maps, everything else inside the shapes
            // that the kernel was given; what stands for a gradient that is not summed is not written.
            GradientTiles::SplitM(tiles) => unsafe {
                backward_split_m::launch_unchecked(
                    &client,
                    cube_count(&client, cubes),
                    CubeDim::new_1d(tiles.units() as u32),
                    addresses,
                    map(
                        stationary_dots,
                        [1, tiles.rows()],
                        Some(tiles.dot_subtiles()),
                    ),
                    map(
                        stationary_values,
                        [1, tiles.rows()],
                        Some(tiles.value_subtiles()),
                    ),
                    map(dots, [1, tiles.columns], Some(tiles.dot_subtiles())),
                    map(values, [1, tiles.columns], Some(tiles.value_subtiles())),
                    term_map(terms, tiles.terms, tiles.columns),
                    terms.clone().into_tensor_arg(),
                    self.mask.argument().into(),
                    bias.clone().map(CubeTensor::into_tensor_arg).into(),
                    extras.lengths_and_ids().into(),
                    boxes(sums.has_dots() && tiles.stores_dots_by_tma(), &dot_target),
                    dot_target.clone().into_tensor_arg(),
                    boxes(
                        sums.has_values() && tiles.stores_values_by_tma(),
                        &value_target,
                    ),
                    value_target.clone().into_tensor_arg(),
                    grid,
                    self.places.extent(problem),
                    score_arguments(problem),
                    steps,
                    self.mask.places(),
                    problem.group() as u32,
                    tiles,
                    kind,
                    dtype_to_storage_type(problem.dtype),
                    extras.bias_element,
                    vector,
                    bias_vector,
                    tiles.fragments(),
                );
            },
            // SAFETY: as above.
            GradientTiles::SplitD(tiles) => unsafe {
                let (summed, target) = match sums {
                    Sums::Values => (values, &value_target),
                    Sums::Dots | Sums::Both => (dots, &dot_target),
                };
                let whole_sums = tiles.has_whole_sums().then_some(tiles.own_subtiles());
                backward_split_d::launch_unchecked(
                    &client,
                    cube_count(&client, cubes),
                    CubeDim::new_1d(SplitDTiles::UNITS as u32),
                    addresses,
                    map(stationary_dots, [1, PRODUCT_ROWS], Some(tiles.dot_chunks())),
                    map(
                        stationary_values,
                        [1, PRODUCT_ROWS],
                        Some(tiles.value_chunks()),
                    ),
                    map(dots, [1, GradientSplitDTiles::COLUMNS], Some(1)),
                    map(values, [1, GradientSplitDTiles::COLUMNS], Some(1)),
                    map(summed, [1, SplitDTiles::VALUE_KEYS], whole_sums),
                    term_map(terms, tiles.terms, GradientSplitDTiles::COLUMNS),
                    terms.clone().into_tensor_arg(),
                    self.mask.argument().into(),
                    bias.clone().map(CubeTensor::into_tensor_arg).into(),
                    extras.lengths_and_ids().into(),
                    boxes(tiles.stores_gradient_by_tma(), target),
                    target.clone().into_tensor_arg(),
                    grid,
                    self.places.extent(problem),
                    score_arguments(problem),
                    steps,
                    self.mask.places(),
                    problem.group() as u32,
                    tiles,
                    kind,
                    dtype_to_storage_type(problem.dtype),
                    extras.bias_element,
                    vector,
                    bias_vector,
                    tiles.fragments(),
                );
            },
        }
        [dot_gradient, value_gradient]
    }
}
