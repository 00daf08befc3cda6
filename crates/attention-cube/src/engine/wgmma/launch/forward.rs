//! Launches the forward of the wgmma engine, and the merge where the keys were split.

use crate::AttentionProblem;
use crate::arguments::{Extras, grid, is_in_vectors, score_arguments, score_kind, structure};
use crate::backend::{AttentionInputs, AttentionOutput};
use crate::engine::wgmma::forward::copies::StepsLaunch;
use crate::engine::wgmma::forward::split_d::forward_split_d;
use crate::engine::wgmma::forward::split_m::forward_split_m;
use crate::engine::wgmma::plan::{ForwardPlan, ForwardTiles, Scheduler, SplitDTiles};
use crate::fragment::FragmentKind;
use crate::fragment::bias::BiasReads;
use crate::fragment::work_tile::TileKind;
use crate::math::schedule::ScheduleLaunch;
use crate::math::side::Side;
use crate::passes::combine::join;
use crate::passes::lengths::Blocks;
use crate::passes::mask_bits::launch::pack;
use burn::backend::cubecl::dtype_to_storage_type;
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::hopper::tma::{is_single, map};
use cube_kit::hopper::{Half, PRODUCT_ROWS};
use cube_kit::launch::{address_type, cube_count, empty};
use cubecl::prelude::CubeDim;

/// Scales within which scores can stay unscaled until the exponential: beyond, f32 could overflow.
const RAW_SCALES: std::ops::Range<f64> = 1e-30..1e30;

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
    let AttentionProblem {
        batch,
        q_heads,
        kv_heads,
        q_len,
        value_dim,
        ..
    } = *problem;
    let client = inputs.query.client.clone();
    let split = splits > 1;
    let shares_tile = shared_heads > 1;

    let blocks = Blocks {
        queries: if shares_tile { q_len } else { tiles.rows() },
        keys: tiles.keys(),
        held: Side::Queries,
    };
    let (extras, places) = Extras::new(&inputs, problem, &[blocks]);
    let tile_rows = (!shares_tile).then_some(tiles.rows());
    let mask = pack(&inputs, problem, Side::Queries, tile_rows, tiles.keys());
    let sinks = inputs.sinks.into_option();
    let sink_element = sinks.as_ref().map_or(extras.bias_element, |sinks| {
        dtype_to_storage_type(sinks.dtype)
    });

    let output_dtype = if split { DType::F32 } else { problem.dtype };
    // The parts lie one after the other, each with all sequences.
    let parts = splits * batch;
    let output = empty(
        &inputs.query,
        [parts, q_heads, q_len, value_dim],
        output_dtype,
    );
    // First all references, then all logarithms of the sums by these.
    let logsumexp = empty(&inputs.query, [2 * parts, q_heads, q_len], DType::F32);

    let (tile_count, heads) = match shares_tile {
        true => (problem.group().div_ceil(shared_heads), kv_heads),
        false => (q_len.div_ceil(tiles.rows()), q_heads),
    };
    let (shares, grid) = grid(tile_count, splits, heads, batch, together);
    let (items, cubes, paired) = match scheduler {
        Scheduler::SingleTile => (shares, shares, 0),
        Scheduler::StaticPersistent(cubes) | Scheduler::DynamicPersistent(cubes) => {
            (shares, cubes, 0)
        }
        Scheduler::StaticPersistentPairs(cubes) => {
            (tile_count.div_ceil(2) * heads * batch, cubes, 1)
        }
    };
    let schedule = ScheduleLaunch::new(items as u32, cubes as u32, paired);
    let bias_vector = match &extras.bias {
        Some(bias) if is_in_vectors(bias, 2) => 2,
        _ => 1,
    };
    let loads_bias_by_tma = match tiles {
        ForwardTiles::SplitM(tiles) => tiles.bias_stages > 0,
        ForwardTiles::SplitD(_) => false,
    };
    let half_of_bias = extras
        .bias
        .as_ref()
        .and_then(|bias| Half::of(bias.dtype))
        .filter(|_| loads_bias_by_tma || bias_vector == 2);
    let bias_reads = match half_of_bias {
        Some(half) => BiasReads::Ahead(half),
        None if extras.has_bias_of_head() && !shares_tile => BiasReads::OnceAHead,
        None => BiasReads::There,
    };
    let fragment = FragmentKind {
        bias_reads,
        ..fragment_kind(problem, Side::Queries)
    };
    let kind = TileKind {
        fragment,
        heads: shared_heads,
        split,
    };
    let stores_output_by_tma = tiles.stores_output_by_tma() && !shares_tile && !split;
    let power = match fragment.raw {
        true => problem.scale * std::f64::consts::LOG2_E,
        false => std::f64::consts::LOG2_E,
    };
    let step = |tensor: &CubeTensor, dim| u32::from(!is_single(tensor, dim));
    let bias_step = |dim| extras.bias.as_ref().map_or(0, |bias| step(bias, dim));
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
        true => [shared_heads, q_len],
        false => [1, tiles.rows()],
    };
    let kernel_sinks = if split { None } else { sinks.clone() };
    let addresses = address_type(
        [&output, &logsumexp]
            .into_iter()
            .chain(&mask.bits)
            .chain(extras.beside_mask()),
    );
    let count = cube_count(&client, cubes);
    let vector = if value_dim.is_multiple_of(2) { 2 } else { 1 };
    // Not used, but there must be one.
    let no_tma_tiles = || map(&inputs.query, [1, PRODUCT_ROWS], None);
    let output_tma_tiles = match stores_output_by_tma {
        true => map(&output, [1, PRODUCT_ROWS], None),
        false => no_tma_tiles(),
    };
    let tma_bias = match &extras.bias {
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
                addresses,
                map(&inputs.query, query_box, query_subtiles),
                map(&inputs.key, [1, tiles.keys], Some(tiles.key_subtiles())),
                map(&inputs.value, [1, tiles.keys], Some(tiles.value_subtiles())),
                tma_bias,
                mask.argument().into(),
                extras.bias().into(),
                extras.lengths_and_ids().into(),
                kernel_sinks.map(CubeTensor::into_tensor_arg).into(),
                output_tma_tiles,
                output.clone().into_tensor_arg(),
                logsumexp.clone().into_tensor_arg(),
                grid,
                schedule,
                places[0].extent(problem),
                score_arguments(problem),
                steps,
                mask.places(),
                problem.group() as u32,
                power as f32,
                tiles,
                kind,
                stores_output_by_tma,
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(output_dtype),
                extras.bias_element,
                sink_element,
                vector,
                bias_vector,
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
                addresses,
                map(&inputs.query, query_box, query_subtiles),
                map(&inputs.key, [1, SplitDTiles::KEYS], Some(1)),
                map(&inputs.value, [1, SplitDTiles::VALUE_KEYS], value_subtiles),
                mask.argument().into(),
                extras.bias().into(),
                extras.lengths_and_ids().into(),
                kernel_sinks.map(CubeTensor::into_tensor_arg).into(),
                output_tma_tiles,
                output.clone().into_tensor_arg(),
                logsumexp.clone().into_tensor_arg(),
                grid,
                schedule,
                places[0].extent(problem),
                score_arguments(problem),
                steps,
                mask.places(),
                problem.group() as u32,
                power as f32,
                tiles,
                kind,
                stores_output_by_tma,
                dtype_to_storage_type(problem.dtype),
                dtype_to_storage_type(output_dtype),
                extras.bias_element,
                sink_element,
                vector,
                bias_vector,
                tiles.fragments(),
            );
        },
    }
    if split {
        let vector = if value_dim.is_multiple_of(4) { 4 } else { 1 };
        join(output, logsumexp, sinks, problem, splits, vector)
    } else {
        AttentionOutput { output, logsumexp }
    }
}

/// What kernels are compiled for whose fragments have rows of this side.
pub(crate) fn fragment_kind(problem: &AttentionProblem, side: Side) -> FragmentKind {
    let score = score_kind(problem);
    FragmentKind {
        side,
        structure: structure(problem),
        score,
        raw: !score.softcap && !score.bias && RAW_SCALES.contains(&problem.scale),
        bias_reads: BiasReads::There,
    }
}
