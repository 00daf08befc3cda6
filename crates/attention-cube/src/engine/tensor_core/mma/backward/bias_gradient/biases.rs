//! The biases of a warp's scores. A CTA computes the gradient of one bias tile. The forward adds this bias tile to the
//! scores of one or several query tiles (see `block_range.rs`).

use crate::engine::tensor_core::common::FragmentKind;
use crate::engine::tensor_core::common::bias::{BiasWords, bias_words};
use crate::engine::tensor_core::common::scoring::Scoring;
use crate::engine::tensor_core::common::stationary_tile::{Stationary, stationary_rows};
use crate::engine::tensor_core::mma::plan::BiasGradientTiles;
use cube_kit::ampere::FRAGMENT_ROWS;
use cubecl::prelude::*;

/// The prefetched biases of a warp's two 16-row fragments, or zeros without prefetch. If the warp has one fragment, `second`
/// is a copy of `first`.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WarpBiases {
    pub first: BiasWords,
    pub second: BiasWords,
}

/// Loads the biases of the thread's rows, starting at row `row` of `tile`. All query tiles of the CTA have the same
/// biases.
#[cube]
pub(super) fn biases_of_warp<F: Float, NB: Size>(
    tile: &Stationary,
    row: i32,
    key_tile: i32,
    scoring: &Scoring<F, NB>,
    #[comptime] tiles: BiasGradientTiles,
    #[comptime] kind: FragmentKind,
) -> WarpBiases {
    if comptime!(!kind.reads_ahead()) {
        WarpBiases {
            first: BiasWords::zeroed(),
            second: BiasWords::zeroed(),
        }
    } else {
        let first_column = key_tile * comptime!(tiles.columns as i32);
        let rows = stationary_rows::<F, NB>(tile, scoring, row, 0u32, kind);
        let first = bias_words::<F, NB>(scoring, &rows, first_column, tiles.columns, kind);
        let second = if comptime!(tiles.fragments == 2) {
            let row = row + comptime!(FRAGMENT_ROWS as i32);
            let rows = stationary_rows::<F, NB>(tile, scoring, row, 0u32, kind);
            bias_words::<F, NB>(scoring, &rows, first_column, tiles.columns, kind)
        } else {
            first
        };
        WarpBiases { first, second }
    }
}
