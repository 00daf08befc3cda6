//! The products of a block: where their operands are, and in which order they start and settle.

use super::producer::Places;
use crate::engine::wgmma::plan::GradientSplitMTiles;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{barrier_wait, uniform};
use cube_kit::hopper::wgmma::{
    descriptor, free_chunk, multiply_output, multiply_scores, take_sums, transposed_descriptor,
};
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES};
use cubecl::prelude::*;

/// A warpgroup's gradients, of which only those that are asked for are used.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Gradients<ND: Size, NV: Size> {
    pub dots: Vector<f32, ND>,
    pub values: Vector<f32, NV>,
}

/// Where a warpgroup's products find their operands: lower halves of descriptors.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Operands {
    pub stationary_dots: u32,
    pub stationary_values: u32,
    pub dots: u32,
    pub values: u32,
    pub summed_dots: u32,
    pub summed_values: u32,
}

#[cube]
pub(super) fn operands(
    places: &Places,
    warpgroup: u32,
    #[comptime] tiles: GradientSplitMTiles,
) -> Operands {
    let own_rows = warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32);
    let subtile_bytes = comptime!(tiles.columns * ROW_BYTES);
    Operands {
        stationary_dots: uniform(descriptor(places.stationary_dots + own_rows)),
        stationary_values: uniform(descriptor(places.stationary_values + own_rows)),
        dots: descriptor(places.dots),
        values: descriptor(places.values),
        summed_dots: transposed_descriptor(places.dots, subtile_bytes),
        summed_values: transposed_descriptor(places.values, subtile_bytes),
    }
}

/// The operands of a block's S and dP, or of its sums: lower halves of descriptors of its stages.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct BlockOperands {
    pub dots: u32,
    pub values: u32,
}

/// The operands of the `count`-th block whose rings start at `dots` and `values`.
#[cube]
pub(super) fn block_operands(
    dots: u32,
    values: u32,
    count: u32,
    #[comptime] tiles: GradientSplitMTiles,
) -> BlockOperands {
    let dot_stage = pipeline_state(count, tiles.dot_stages).stage;
    let value_stage = pipeline_state(count, tiles.value_stages).stage;
    BlockOperands {
        dots: uniform(dots + dot_stage * comptime!((tiles.dot_bytes() >> 4) as u32)),
        values: uniform(values + value_stage * comptime!((tiles.value_bytes() >> 4) as u32)),
    }
}

/// Waits for the `count`-th block's queries or keys.
#[cube]
pub(super) fn await_dots(places: &Places, count: u32, #[comptime] tiles: GradientSplitMTiles) {
    let slot = pipeline_state(count, tiles.dot_stages);
    barrier_wait(places.dot_full + 8u32 * slot.stage, slot.parity);
}

/// Waits for the `count`-th block's values or output gradients.
#[cube]
pub(super) fn await_values(places: &Places, count: u32, #[comptime] tiles: GradientSplitMTiles) {
    let slot = pipeline_state(count, tiles.value_stages);
    barrier_wait(places.value_full + 8u32 * slot.stage, slot.parity);
}

/// Starts S of a block.
#[cube]
pub(super) fn start_s<NS: Size>(
    held: u32,
    block: BlockOperands,
    #[comptime] tiles: GradientSplitMTiles,
) -> Vector<f32, NS> {
    multiply_scores::<NS>(
        held,
        block.dots,
        comptime!(tiles.score_product(tiles.head_dim)),
    )
}

/// Starts dP of a block, where it is needed.
#[cube]
pub(super) fn start_dp<NS: Size>(
    held: u32,
    block: BlockOperands,
    #[comptime] tiles: GradientSplitMTiles,
) -> Vector<f32, NS> {
    if comptime!(tiles.sums.has_dots()) {
        multiply_scores::<NS>(
            held,
            block.values,
            comptime!(tiles.score_product(tiles.value_dim)),
        )
    } else {
        Vector::<f32, NS>::zeroed()
    }
}

/// Starts the products that add a block's part.
#[cube]
pub(super) fn multiply<NP: Size, ND: Size, NV: Size>(
    dots: Vector<f32, ND>,
    values: Vector<f32, NV>,
    p: Vector<u32, NP>,
    ds: Vector<u32, NP>,
    block: BlockOperands,
    #[comptime] tiles: GradientSplitMTiles,
) -> Gradients<ND, NV> {
    let values = if comptime!(tiles.sums.has_values()) {
        multiply_output::<NV, NP>(
            values,
            p,
            block.values,
            comptime!(tiles.sum_product(tiles.value_columns())),
        )
    } else {
        values
    };
    let dots = if comptime!(tiles.sums.has_dots()) {
        multiply_output::<ND, NP>(
            dots,
            ds,
            block.dots,
            comptime!(tiles.sum_product(tiles.dot_columns())),
        )
    } else {
        dots
    };
    Gradients::<ND, NV> { dots, values }
}

/// The sums, once at most `pending` later products are in flight; frees the stages that were read last.
#[cube]
pub(super) fn settle<NP: Size, ND: Size, NV: Size>(
    sums: Gradients<ND, NV>,
    p: Vector<u32, NP>,
    ds: Vector<u32, NP>,
    places: &Places,
    count: u32,
    elected: u32,
    #[comptime] pending: usize,
    #[comptime] tiles: GradientSplitMTiles,
) -> Gradients<ND, NV> {
    let fragments = comptime!(tiles.fragments());
    let values = if comptime!(tiles.sums.has_values()) {
        let pending = comptime!(pending + usize::from(tiles.sums.has_dots()));
        let values = take_sums::<NV, NP>(
            sums.values,
            p,
            comptime!(tiles.value_columns() / 2),
            comptime!(fragments[3]),
            pending,
        );
        let stage = pipeline_state(count, tiles.value_stages).stage;
        free_chunk(places.value_empty + 8u32 * stage, elected, pending, 1usize);
        values
    } else {
        sums.values
    };
    let dots = if comptime!(tiles.sums.has_dots()) {
        let dots = take_sums::<ND, NP>(
            sums.dots,
            ds,
            comptime!(tiles.dot_columns() / 2),
            comptime!(fragments[2]),
            pending,
        );
        let stage = pipeline_state(count, tiles.dot_stages).stage;
        free_chunk(places.dot_empty + 8u32 * stage, elected, pending, 1usize);
        dots
    } else {
        sums.dots
    };
    Gradients::<ND, NV> { dots, values }
}
