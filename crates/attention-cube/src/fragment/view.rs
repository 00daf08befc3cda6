//! How a tile sees a block that it visits: as a whole, or by bits.

use super::RowPair;
use super::mask::{MaskWords, mask_words, words_of_segments};
use super::scoring::Masking;
use super::visits::{TilePosition, mask_sight};
use super::work_tile::TileKind;
use crate::math::score::is_hidden;
use crate::math::visibility::{documents_of, is_inside};
use crate::passes::mask_bits::kernel::{EVERY_KEY, EVERYTHING};
use cubecl::prelude::*;

/// How a tile sees a block.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct View {
    /// Every query sees every key, but for what a bias hides.
    pub whole: bool,
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
    let mut whole = inside;
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
    let shared = is_one && own.first == own.last && own.first == other.first;
    if comptime!(structure.segments) {
        whole = whole && shared;
        may_have_masked = !shared;
        if comptime!(!structure.mask) {
            // Some row is of the first of the tile's documents, and some of the last, and sees what is of it.
            let meets = is_one && (other.first == own.first || other.first == own.last);
            may_have_masked = !(shared || (inside && meets));
        }
    }
    if comptime!(kind.sums_up_mask()) {
        let sight = mask_sight(tile_position, block, masking);
        whole = whole && sight == EVERYTHING;
        may_have_masked = may_have_masked || !inside || sight < EVERY_KEY;
    }
    if comptime!(structure.mask && !kind.sums_up_mask()) {
        whole = false;
    }
    if comptime!(kind.fragment.has_bias_of_head()) {
        let hidden = is_hidden(rows.bias_of_head);
        whole = whole && !hidden;
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
        may_have_masked,
        mask_words: words,
    }
}
