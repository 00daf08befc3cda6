//! Computes whether all rows of a tile see all columns of a block. The columns are keys for a tile of queries, and queries
//! for a tile of keys. For a partly visible block, mask bits tell which columns each row sees.

use super::RowPair;
use super::block_range::{TilePosition, block_pair, mask_summary};
use super::mask::{MaskWords, mask_words, words_of_intervals, words_of_segments};
use super::scoring::Masking;
use super::tile_scheduler::TileKind;
use crate::auxiliary::mask_bits::kernel::{EVERY_KEY, EVERYTHING};
use crate::math::score::is_hidden;
use crate::math::visibility::{documents_of, is_inside, is_within_intervals};
use cubecl::prelude::*;

/// The visibility of a block: whether all rows of a tile see all columns, and the mask bits of a thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BlockMask {
    /// True if every row sees every column of the block. If each score has its own bias, a bias of −∞ may still hide a
    /// column from a row.
    pub whole: bool,
    /// True if the block may contain a column that lies in the tile's visible range but is hidden from all rows of the tile.
    pub may_have_masked: bool,
    pub mask_words: MaskWords,
}

/// Computes the visibility of a block of `size` columns. Also loads the mask bits of the thread's two rows for
/// `columns` columns of the block, starting at column `32 · first_word`. If the GEMM that computes S is in flight
/// during the call, the GEMM hides the latency of the loads.
#[cube]
pub(crate) fn block_mask(
    tile_position: &TilePosition,
    rows: &RowPair,
    block: i32,
    first_word: u32,
    masking: &Masking,
    #[comptime] size: usize,
    #[comptime] columns: usize,
    #[comptime] kind: TileKind,
) -> BlockMask {
    let structure = comptime!(kind.fragment.structure);
    let block_words = comptime!(size.div_ceil(32) as u32);
    let size = comptime!(size as i32);
    let inside = is_inside(&tile_position.run, block * size, size);
    let mut whole = inside;
    // If `inside`, the visible range of every row contains the block. Otherwise, mask and visible ranges together can
    // hide a column from all rows: the mask hides the column from some rows, and the visible ranges of the remaining
    // rows exclude the column.
    let mut may_have_masked = false;
    let side = comptime!(kind.fragment.side);
    let own = documents_of(
        &masking.seq_lens,
        &masking.lengths_and_ids,
        tile_position.batch,
        tile_position.row_block,
        side,
        structure,
    );
    let other = comptime!(side.other());
    let other = documents_of(
        &masking.seq_lens,
        &masking.lengths_and_ids,
        tile_position.batch,
        block as u32,
        other,
        structure,
    );
    let is_one = other.first == other.last;
    let shared = is_one && own.first == own.last && own.first == other.first;
    if comptime!(structure.segments) {
        whole = whole && shared;
        may_have_masked = !shared;
        if comptime!(!structure.mask) {
            // At least one row of the tile lies in the tile's first segment, and at least one in the tile's last
            // segment. If the whole block lies in one of these two segments, and `inside` is true, the rows in that
            // segment see all columns. No column is then hidden from all rows.
            let may_intersect = is_one && (other.first == own.first || other.first == own.last);
            may_have_masked = !(shared || (inside && may_intersect));
        }
    }
    let within = if comptime!(structure.intervals > 0) {
        let blocks = block_pair(tile_position, block, side);
        is_within_intervals(
            &masking.seq_lens,
            &masking.lengths_and_ids,
            tile_position.batch,
            blocks.query,
            blocks.key,
            structure,
        )
    } else {
        inside
    };
    if comptime!(structure.intervals > 0) {
        whole = whole && within;
        may_have_masked = may_have_masked || !within;
    }
    if comptime!(kind.sums_up_mask()) {
        let seq_info = mask_summary(tile_position, block, masking);
        whole = whole && seq_info == EVERYTHING;
        may_have_masked = may_have_masked || !inside || seq_info < EVERY_KEY;
    }
    if comptime!(structure.mask && !kind.sums_up_mask()) {
        whole = false;
    }
    if comptime!(kind.fragment.has_bias_of_head()) {
        let hidden = is_hidden(rows.bias_of_head);
        whole = whole && !hidden;
        may_have_masked = may_have_masked || hidden;
    }
    if comptime!(kind.fragment.hides_single_keys() || (structure.mask && !kind.sums_up_mask())) {
        may_have_masked = true;
    }
    let words = mask_words(
        masking,
        rows,
        block as u32 * block_words + first_word,
        block,
        first_word,
        whole,
        comptime!(size as usize),
        columns,
        kind.fragment,
    );
    let words = if comptime!(structure.segments) {
        words_of_segments(
            words,
            masking,
            rows,
            block * size + (first_word * 32u32) as i32,
            other,
            shared,
            columns,
            kind.fragment,
        )
    } else {
        words
    };
    let words = if comptime!(structure.intervals > 0) {
        words_of_intervals(
            words,
            masking,
            rows,
            block * size + (first_word * 32u32) as i32,
            within,
            columns,
            kind.fragment,
        )
    } else {
        words
    };
    BlockMask {
        whole,
        may_have_masked,
        mask_words: words,
    }
}
