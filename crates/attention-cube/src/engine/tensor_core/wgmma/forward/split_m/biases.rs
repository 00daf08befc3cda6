//! Loads a block's biases before the block's scores are ready. If TMA has copied the biases to shared memory, the
//! threads load them from there, else from global memory.

use super::mainloop::Thread;
use super::producer::SharedOffsets;
use crate::engine::tensor_core::common::RowPair;
use crate::engine::tensor_core::common::bias::{BiasWords, bias_words};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::tile_scheduler::TileKind;
use crate::engine::tensor_core::wgmma::plan::WgmmaSplitMTiles;
use cube_kit::hopper::PRODUCT_ROWS;
use cube_kit::hopper::pipeline::pipeline_state;
use cube_kit::hopper::ptx::{async_proxy_fence, barrier_arrive, barrier_wait};
use cube_kit::hopper::wgmma::{STEP, load_rows};
use cube_kit::nvidia::ROW_BYTES;
use cubecl::prelude::*;

/// Loads the thread's biases of a block, if the kernel loads biases before the dot products `q·k` (S) are ready.
/// `count` is the block's index among all blocks that the CTA processes.
#[cube]
pub(super) fn biases_of<F: Float, NB: Size>(
    scoring: &Scoring<F, NB>,
    rows: &RowPair,
    block: i32,
    count: u32,
    offsets: &SharedOffsets,
    thread: Thread,
    #[comptime] tiles: WgmmaSplitMTiles,
    #[comptime] kind: TileKind,
) -> BiasWords {
    if comptime!(tiles.bias_stages > 0) {
        let slot = pipeline_state(count, tiles.bias_stages);
        barrier_wait(offsets.bias_full + 8u32 * slot.stage, slot.parity);
        let words = load_rows::<Const<32>>(
            offsets.biases
                + slot.stage * comptime!(tiles.bias_bytes() as u32)
                + thread.warpgroup * comptime!((PRODUCT_ROWS * ROW_BYTES) as u32),
            comptime!(tiles.rows()),
            comptime!(tiles.keys / STEP),
        );
        // The fence orders two accesses to one shared-memory buffer: the loads of the biases, and TMA's next write.
        // Without the fence, some loads returned data of the next write.
        async_proxy_fence();
        barrier_arrive(offsets.bias_empty + 8u32 * slot.stage, thread.elected);
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
