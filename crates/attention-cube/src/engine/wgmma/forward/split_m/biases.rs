//! Where a block's biases come from before its scores are there: from the ring of the copy engine, or from memory.

use super::pass::Thread;
use super::producer::Places;
use crate::engine::wgmma::plan::SplitMTiles;
use crate::fragment::RowPair;
use crate::fragment::bias::{BiasWords, bias_words};
use crate::fragment::scoring::Scoring;
use crate::fragment::work_tile::TileKind;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{async_proxy_fence, barrier_arrive, barrier_wait};
use cube_kit::hopper::wgmma::{STEP, load_rows};
use cube_kit::hopper::{PRODUCT_ROWS, ROW_BYTES};
use cubecl::prelude::*;

/// The thread's biases of a block, the `count`-th that the cube visits, where these are read before the scores are there.
#[cube]
pub(super) fn biases_of<F: Float, NB: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    block: i32,
    count: u32,
    places: &Places,
    thread: Thread,
    #[comptime] tiles: SplitMTiles,
    #[comptime] kind: TileKind,
) -> BiasWords {
    if comptime!(tiles.bias_stages > 0) {
        let slot = pipeline_state(count, tiles.bias_stages);
        barrier_wait(places.bias_full + 8u32 * slot.stage, slot.parity);
        let words = load_rows::<Const<32>>(
            places.biases
                + slot.stage * comptime!(tiles.bias_bytes() as u32)
                + thread.warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
            comptime!(tiles.rows()),
            comptime!(tiles.keys / STEP),
        );
        // Behind products that read shared memory, loads were seen to be served after the next box had come.
        async_proxy_fence();
        barrier_arrive(places.bias_empty + 8u32 * slot.stage, thread.elected);
        words
    } else {
        bias_words::<F, NB>(
            scoring,
            rows,
            block * comptime!(tiles.keys as i32),
            tiles.keys,
            kind.fragment,
        )
    }
}
