//! How a tile sees a block that it visits: as a whole, or by bits.

use super::mask::{MaskWords, mask_words, words_of_segments};
use super::scoring::Masking;
use super::visits::{TilePosition, mask_sight};
use super::work_tile::TileKind;
use super::{RowPair, rows_end};
use crate::math::score::is_hidden;
use crate::math::side::Side;
use crate::math::visibility::{documents_of, id_of, is_inside};
use crate::passes::mask_bits::kernel::{EVERY_KEY, EVERYTHING};
use cubecl::prelude::*;

/// How a tile sees a block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct View {
    /// Every query of the warp sees every key, but for what a bias hides.
    pub whole: bool,
    /// So does every query of the tile.
    pub whole_of_tile: bool,
    /// There may be keys that nobody sees, other than those before and after the tile's run.
    pub may_have_masked: bool,
    pub mask_words: MaskWords,
}

/// How the tile sees the block, of `size` keys. Asked for before the scores are there, the mask's words of the thread's
/// rows, for `columns` keys from the `first_word`-th of the block's words on, come while these are computed.
#[cube]
pub(crate) fn view(
    tile_position: &TilePosition,
    rows: &RowPair,
    block: i32,
    first_word: u32,
    masking: &Masking,
    #[comptime] size: usize,
    #[comptime] columns: usize,
    #[comptime] kind: TileKind,
) -> View {
    let structure = comptime!(kind.fragment.structure);
    let block_words = comptime!(size.div_ceil(32) as u32);
    let size = comptime!(size as i32);
    let inside = is_inside(&tile_position.run, block * size, size);
    let mut whole_of_tile = inside;
    // A mask and a run hide different keys from different queries, and together one from all.
    let mut may_have_masked = false;
    let side = comptime!(kind.fragment.side);
    let own = documents_of(
        &masking.extent,
        &masking.lengths_and_ids,
        tile_position.batch,
        tile_position.row_block,
        side,
        structure,
    );
    let other = comptime!(side.other());
    let other = documents_of(
        &masking.extent,
        &masking.lengths_and_ids,
        tile_position.batch,
        block as u32,
        other,
        structure,
    );
    let is_one = other.first == other.last;
    let mut shared = is_one && own.first == own.last && own.first == other.first;
    if comptime!(structure.segments) {
        whole_of_tile = whole_of_tile && shared;
        may_have_masked = !shared;
        if comptime!(!structure.mask) {
            // Some row is of the first of the tile's documents, and some of the last, and sees what is of it.
            let meets = is_one && (other.first == own.first || other.first == own.last);
            may_have_masked = !(shared || (inside && meets));
        }
        if is_one && own.first != own.last {
            // Of a tile between documents, most warps are of one.
            shared = is_of_document(rows, other.first, masking, side);
        }
    }
    let mut whole = inside;
    if comptime!(structure.segments) {
        whole = inside && shared;
    }
    if comptime!(kind.sums_up_mask()) {
        let sight = mask_sight(tile_position, block, masking);
        whole = whole && sight == EVERYTHING;
        whole_of_tile = whole_of_tile && sight == EVERYTHING;
        may_have_masked = may_have_masked || !inside || sight < EVERY_KEY;
    }
    if comptime!(structure.mask && !kind.sums_up_mask()) {
        whole = false;
        whole_of_tile = false;
    }
    if comptime!(kind.fragment.has_bias_of_head()) {
        let hidden = is_hidden(rows.bias_of_head);
        whole = whole && !hidden;
        whole_of_tile = whole_of_tile && !hidden;
        may_have_masked = may_have_masked || hidden;
    }
    if comptime!(kind.fragment.has_own_biases() || (structure.mask && !kind.sums_up_mask())) {
        may_have_masked = true;
    }
    let words = mask_words(
        masking,
        rows,
        block as u32 * block_words + first_word,
        whole,
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
    View {
        whole,
        whole_of_tile,
        may_have_masked,
        mask_words: words,
    }
}

/// Whether all of the warp's rows are of this document. Of a row that does not exist, the last one's counts.
#[cube]
fn is_of_document(
    rows: &RowPair,
    document: i32,
    masking: &Masking,
    #[comptime] side: Side,
) -> bool {
    let extent = &masking.extent;
    let last = rows_end(extent, side) - 1i32;
    let ids = &masking.lengths_and_ids;
    let first = id_of(extent, ids, rows.batch, min(rows.position_0, last), side);
    let second = id_of(extent, ids, rows.batch, min(rows.position_1, last), side);
    plane_all(first == document && second == document)
}
