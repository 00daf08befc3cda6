//! Launches the forward of the wgmma engine. With split-KV, the module also launches a second kernel, which combines
//! the results of the splits.

use crate::engine::tensor_core::common::launch::{BiasesAhead, ForwardPass, ForwardTiling};
use crate::engine::tensor_core::wgmma::forward::load::ForwardMapsLaunch;
use crate::engine::tensor_core::wgmma::forward::load::StepsLaunch;
use crate::engine::tensor_core::wgmma::forward::pages::PageTableLaunch;
use crate::engine::tensor_core::wgmma::forward::split_d::forward_split_d;
use crate::engine::tensor_core::wgmma::forward::split_m::forward_split_m;
use crate::engine::tensor_core::wgmma::plan::{
    Scheduler, WgmmaForwardPlan, WgmmaForwardTiles, WgmmaSplitDTiles, box_rows,
};
use crate::math::schedule::ScheduleLaunch;
use crate::problem::AttentionProblem;
use crate::types::tensors::{AttentionInputs, AttentionOutput};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::tma::{is_single, map};
use cube_kit::launch::cube_count;
use cubecl::prelude::CubeDim;

pub(crate) fn forward(
    inputs: AttentionInputs<CubeBackend>,
    problem: &AttentionProblem,
    plan: WgmmaForwardPlan,
) -> AttentionOutput<CubeBackend> {
    let WgmmaForwardPlan {
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
        WgmmaForwardTiles::SplitM(tiles) => tiles.bias_stages > 0,
        WgmmaForwardTiles::SplitD(_) => false,
    };
    let division = ForwardTiling {
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
    let bias_step = |dim| {
        pass.optional_inputs
            .bias
            .as_ref()
            .map_or(0, |bias| step(bias, dim))
    };
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
    // The kernel may ignore the TMA tensor map of the output, or of the bias. The launch then passes a map of the
    // queries in its place.
    let no_tma_tiles = || map(&inputs.query, [1, PRODUCT_ROWS], None);
    let output_tma_tiles = match stores_output_by_tma {
        true => map(&pass.output, [1, PRODUCT_ROWS], None),
        false => no_tma_tiles(),
    };
    let tma_bias = match &pass.optional_inputs.bias {
        Some(bias) if loads_bias_by_tma => map(bias, [1, tiles.rows()], None),
        _ => no_tma_tiles(),
    };
    let page_table = inputs.page_table.as_option();
    let page_table_arg = page_table.map(|page_table| {
        let last_page = inputs.key.meta.shape()[0] as u32 - 1;
        PageTableLaunch::new(page_table.clone().into_tensor_arg(), last_page)
    });
    // A box lies in one page. A box of several subtiles has the layout of shared memory only if it has all rows.
    let rows_map = |tensor: &CubeTensor, rows: usize, subtiles: usize| {
        let of_box = box_rows(rows, pass.kind.page_len);
        let is_one_box = subtiles == 1 || of_box == rows;
        map(tensor, [1, of_box], is_one_box.then_some(subtiles))
    };
    match tiles {
        // SAFETY: TMA accesses only elements inside the tensors' shapes. The kernel clamps entries of the page table to
        // existing pages. The kernel accesses the output, the LSE, the bias and the mask only at rows below `q_len` and at columns below `value_dim` or `kv_len`.
        WgmmaForwardTiles::SplitM(tiles) => unsafe {
            let query_subtiles = (!shares_tile).then_some(tiles.key_subtiles());
            forward_split_m::launch_unchecked(
                &client,
                count,
                CubeDim::new_1d(tiles.units() as u32),
                pass.addresses(page_table),
                ForwardMapsLaunch::new(
                    map(&inputs.query, query_box, query_subtiles),
                    rows_map(&inputs.key, tiles.keys, tiles.key_subtiles()),
                    rows_map(&inputs.value, tiles.keys, tiles.value_subtiles()),
                    tma_bias,
                    output_tma_tiles,
                    steps,
                    page_table_arg.into(),
                ),
                pass.scoring(problem),
                pass.sinks().into(),
                pass.output.clone().into_tensor_arg(),
                pass.logsumexp.clone().into_tensor_arg(),
                pass.scheduler(problem, schedule),
                pass.scale_log2,
                tiles,
                pass.kind,
                stores_output_by_tma,
                pass.elements(problem),
                pass.sizes(tiles.fragments()),
            );
        },
        // SAFETY: TMA accesses only elements inside the tensors' shapes. The kernel accesses all other tensors only at rows
        // below `q_len` and at columns below `value_dim` or `kv_len`.
        WgmmaForwardTiles::SplitD(tiles) => unsafe {
            let query_subtiles = (!shares_tile).then_some(tiles.key_chunks());
            let value_rows = WgmmaSplitDTiles::VALUE_KEYS;
            let of_value_box = box_rows(value_rows, pass.kind.page_len);
            forward_split_d::launch_unchecked(
                &client,
                count,
                CubeDim::new_1d(WgmmaSplitDTiles::UNITS as u32),
                pass.addresses(page_table),
                ForwardMapsLaunch::new(
                    map(&inputs.query, query_box, query_subtiles),
                    rows_map(&inputs.key, WgmmaSplitDTiles::KEYS, 1),
                    match tiles.has_whole_values() {
                        true => rows_map(&inputs.value, value_rows, tiles.value_subtiles()),
                        false => map(&inputs.value, [1, of_value_box], None),
                    },
                    tma_bias,
                    output_tma_tiles,
                    steps,
                    page_table_arg.into(),
                ),
                pass.scoring(problem),
                pass.sinks().into(),
                pass.output.clone().into_tensor_arg(),
                pass.logsumexp.clone().into_tensor_arg(),
                pass.scheduler(problem, schedule),
                pass.scale_log2,
                tiles,
                pass.kind,
                stores_output_by_tma,
                pass.elements(problem),
                pass.sizes(tiles.fragments()),
            );
        },
    }
    pass.results(problem)
}
