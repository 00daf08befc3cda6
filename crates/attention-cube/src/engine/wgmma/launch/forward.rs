//! Launches the forward of the wgmma engine, and the merge where the keys were split.

use crate::AttentionProblem;
use crate::arguments::score_arguments;
use crate::backend::{AttentionInputs, AttentionOutput};
use crate::engine::wgmma::forward::copies::StepsLaunch;
use crate::engine::wgmma::forward::split_d::forward_split_d;
use crate::engine::wgmma::forward::split_m::forward_split_m;
use crate::engine::wgmma::plan::{ForwardPlan, ForwardTiles, Scheduler, SplitDTiles};
use crate::fragment::launch::{BiasesAhead, Division, ForwardPass};
use crate::math::schedule::ScheduleLaunch;
use burn::backend::cubecl::dtype_to_storage_type;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::tma::{is_single, map};
use cube_kit::launch::cube_count;
use cubecl::prelude::CubeDim;

pub(crate) fn forward(
    inputs: AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    plan: ForwardPlan,
) -> AttentionOutput<CubeBackend> {
    let ForwardPlan {
        tiles,
        heads: shared_heads,
        splits,
        together,
        scheduler,
        copies: _,
    } = plan;
    let client = inputs.query.client.clone();
    let shares_tile = shared_heads > 1;
    let loads_bias_by_tma = match tiles {
        ForwardTiles::SplitM(tiles) => tiles.bias_stages > 0,
        ForwardTiles::SplitD(_) => false,
    };
    let division = Division {
        rows: tiles.rows(),
        keys: tiles.keys(),
        heads: shared_heads,
        splits,
        together,
    };
    let ahead = match loads_bias_by_tma {
        true => BiasesAhead::ByTma,
        false => BiasesAhead::ByTwos,
    };
    let pass = ForwardPass::new(&inputs, problem, division, ahead);
    let (items, cubes, paired) = match scheduler {
        Scheduler::SingleTile => (pass.work_tiles, pass.work_tiles, 0),
        Scheduler::StaticPersistent(cubes) | Scheduler::DynamicPersistent(cubes) => {
            (pass.work_tiles, cubes, 0)
        }
        Scheduler::StaticPersistentPairs(cubes) => (
            pass.tiles.div_ceil(2) * pass.tile_heads * problem.batch,
            cubes,
            1,
        ),
    };
    let schedule = ScheduleLaunch::new(items as u32, cubes as u32, paired);
    let stores_output_by_tma = tiles.stores_output_by_tma() && !shares_tile && !pass.kind.split;
    let step = |tensor: &CubeTensor, dim| u32::from(!is_single(tensor, dim));
    let bias_step = |dim| pass.extras.bias.as_ref().map_or(0, |bias| step(bias, dim));
    let steps = StepsLaunch::new(
        step(&inputs.query, 0),
        step(&inputs.key, 0),
        step(&inputs.key, 1),
        step(&inputs.value, 0),
        step(&inputs.value, 1),
        bias_step(0),
        bias_step(1),
    );
    let query_box = match shares_tile {
        true => [shared_heads, problem.q_len],
        false => [1, tiles.rows()],
    };
    let count = cube_count(&client, cubes);
    // Not used, but there must be one.
    let no_tma_tiles = || map(&inputs.query, [1, PRODUCT_ROWS], None);
    let output_tma_tiles = match stores_output_by_tma {
        true => map(&pass.output, [1, PRODUCT_ROWS], None),
        false => no_tma_tiles(),
    };
    let tma_bias = match &pass.extras.bias {
        Some(bias) if loads_bias_by_tma => map(bias, [1, tiles.rows()], None),
        _ => no_tma_tiles(),
    };
    match tiles {
        // SAFETY: the copy engine stays inside the shapes of its maps, everything else inside the shapes
        // that the kernel was given.
        ForwardTiles::SplitM(tiles) => unsafe {
            let query_subtiles = (!shares_tile).then_some(tiles.key_subtiles());
            forward_split_m::launch_unchecked(
                &client,
                count,
                CubeDim::new_1d(tiles.units() as u32),
                pass.addresses([]),
                map(&inputs.query, query_box, query_subtiles),
                map(&inputs.key, [1, tiles.keys], Some(tiles.key_subtiles())),
                map(&inputs.value, [1, tiles.keys], Some(tiles.value_subtiles())),
                tma_bias,
                pass.mask.argument().into(),
                pass.extras.bias().into(),
                pass.extras.lengths_and_ids().into(),
                pass.sinks().into(),
                output_tma_tiles,
                pass.output.clone().into_tensor_arg(),
                pass.logsumexp.clone().into_tensor_arg(),
                pass.grid(problem),
                schedule,
                pass.extent(problem),
                score_arguments(problem),
                steps,
                pass.mask.places(),
                problem.group() as u32,
                pass.power,
                tiles,
                pass.kind,
                stores_output_by_tma,
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(pass.output.dtype),
                pass.extras.bias_element,
                pass.sink_element,
                pass.output_vector,
                pass.bias_vector,
                tiles.fragments(),
            );
        },
        // SAFETY: as above.
        ForwardTiles::SplitD(tiles) => unsafe {
            let query_subtiles = (!shares_tile).then_some(tiles.key_chunks());
            let value_subtiles = tiles.has_whole_values().then_some(tiles.value_subtiles());
            forward_split_d::launch_unchecked(
                &client,
                count,
                CubeDim::new_1d(SplitDTiles::UNITS as u32),
                pass.addresses([]),
                map(&inputs.query, query_box, query_subtiles),
                map(&inputs.key, [1, SplitDTiles::KEYS], Some(1)),
                map(&inputs.value, [1, SplitDTiles::VALUE_KEYS], value_subtiles),
                pass.mask.argument().into(),
                pass.extras.bias().into(),
                pass.extras.lengths_and_ids().into(),
                pass.sinks().into(),
                output_tma_tiles,
                pass.output.clone().into_tensor_arg(),
                pass.logsumexp.clone().into_tensor_arg(),
                pass.grid(problem),
                schedule,
                pass.extent(problem),
                score_arguments(problem),
                steps,
                pass.mask.places(),
                problem.group() as u32,
                pass.power,
                tiles,
                pass.kind,
                stores_output_by_tma,
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(pass.output.dtype),
                pass.extras.bias_element,
                pass.sink_element,
                pass.output_vector,
                pass.bias_vector,
                tiles.fragments(),
            );
        },
    }
    pass.results(problem)
}
