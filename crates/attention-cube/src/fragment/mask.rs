//! What mask and segments show to a fragment's rows, as bits.

use super::scoring::Masking;
use super::{FragmentKind, Known, RowPair, columns_end, rows_end};
use crate::math::visibility::{Documents, id_of};
use crate::passes::mask_bits::kernel::{bits_of_run, word_of};
use cubecl::prelude::*;

/// Bits of the thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BitPair {
    pub first: u32,
    pub second: u32,
}

/// What the rows see of the columns of the fragment's `word`-th 32, from the thread's own on.
#[cube]
pub(crate) fn bits_of_word(
    mask_words: MaskWords,
    known: &Known,
    first_column: i32,
    #[comptime] word: usize,
) -> BitPair {
    let first = first_column + comptime!(32 * word as i32);
    let shift = UNIT_POS % 4u32 * 2u32;
    let own_0 = mask_words.extract(comptime!(2 * word));
    let own_1 = mask_words.extract(comptime!(2 * word + 1));
    BitPair {
        first: (own_0 & bits_of_run(known.run_0, first)) >> shift,
        second: (own_1 & bits_of_run(known.run_1, first)) >> shift,
    }
}

/// What mask and segments show to a thread's two rows of up to 128 keys, a bit a key.
pub(crate) type MaskWords = Vector<u32, Const<8>>;

/// A thread's words of the mask for `columns` keys from the `first_word`-th on.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is the compiler's, the inner the kernel's"
)]
pub(crate) fn mask_words(
    masking: &Masking,
    rows: &RowPair,
    first_word: u32,
    whole: bool,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> MaskWords {
    let mut words = Vector::<u32, Const<8>>::zeroed();
    if comptime!(kind.structure.mask) {
        if !whole {
            let mask = &masking.mask;
            let places = &masking.mask_places;
            let last_row = rows_end(&masking.extent, kind.side) - 1i32;
            let row_0 = min(rows.position_0, last_row) as u32;
            let row_1 = min(rows.position_1, last_row) as u32;
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                let at = first_word + comptime!(word as u32);
                let own_0 = word_of(mask, places, rows.batch, rows.head_0, row_0, at);
                let own_1 = word_of(mask, places, rows.batch, rows.head_1, row_1, at);
                words.insert(comptime!(2 * word), own_0);
                words.insert(comptime!(2 * word + 1), own_1);
            }
        }
    }
    words
}

/// The words without what segments hide of `columns` columns from `first_column` on, of those that the thread has, in a block of
/// these `documents`. Where the tile and the block `share` one document, this is nothing; where the block is of one, all or nothing
/// of a row.
#[cube]
pub(crate) fn words_of_segments(
    words: MaskWords,
    masking: &Masking,
    rows: &RowPair,
    first_column: i32,
    documents: Documents,
    share: bool,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> MaskWords {
    let mut words = words;
    if comptime!(!kind.structure.mask) {
        #[unroll]
        for word in 0..comptime!(2 * columns.div_ceil(32)) {
            words.insert(word, 0xffff_ffffu32);
        }
    }
    if !share {
        let extent = &masking.extent;
        let lengths_and_ids = &masking.lengths_and_ids;
        let side = comptime!(kind.side);
        let other = comptime!(side.other());
        let last_row = rows_end(extent, side) - 1i32;
        let last_column = columns_end(extent, side) - 1i32;
        let id_0 = id_of(
            extent,
            lengths_and_ids,
            rows.batch,
            min(rows.position_0, last_row),
            side,
        );
        let id_1 = id_of(
            extent,
            lengths_and_ids,
            rows.batch,
            min(rows.position_1, last_row),
            side,
        );
        if documents.first == documents.last {
            let all_0 = select(documents.first == id_0, 0xffff_ffffu32, 0u32);
            let all_1 = select(documents.first == id_1, 0xffff_ffffu32, 0u32);
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                words = restricted(words, all_0, all_1, word);
            }
        } else {
            // A lane reads one column's id of every 32, and the warp compares them for all of its rows that are of one document:
            // these are few documents, most often one.
            let lane = UNIT_POS % 32u32;
            let mut ids = Vector::<i32, Const<4>>::zeroed();
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                let column = first_column + lane as i32 + comptime!(32 * word as i32);
                let column = min(column, last_column);
                ids.insert(
                    word,
                    id_of(extent, lengths_and_ids, rows.batch, column, other),
                );
            }
            let mut own = MaskWords::zeroed();
            let mut waits_0 = true.runtime();
            let mut waits_1 = true.runtime();
            let mut waiting = ballot(true.runtime());
            while waiting != 0u32 {
                let id = plane_shuffle(select(waits_0, id_0, id_1), waiting.trailing_zeros());
                let is_0 = id_0 == id;
                let is_1 = id_1 == id;
                #[unroll]
                for word in 0..columns.div_ceil(32) {
                    let seen = ballot(ids.extract(word) == id);
                    own.insert(
                        comptime!(2 * word),
                        select(is_0, seen, own.extract(comptime!(2 * word))),
                    );
                    own.insert(
                        comptime!(2 * word + 1),
                        select(is_1, seen, own.extract(comptime!(2 * word + 1))),
                    );
                }
                waits_0 = waits_0 && !is_0;
                waits_1 = waits_1 && !is_1;
                waiting = ballot(waits_0 || waits_1);
            }
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                words = restricted(
                    words,
                    own.extract(comptime!(2 * word)),
                    own.extract(comptime!(2 * word + 1)),
                    word,
                );
            }
        }
    }
    words
}

/// The words with only these bits left of the `word`-th of each row.
#[cube]
fn restricted(words: MaskWords, bits_0: u32, bits_1: u32, #[comptime] word: usize) -> MaskWords {
    let mut words = words;
    let word_0 = words.extract(comptime!(2 * word));
    let word_1 = words.extract(comptime!(2 * word + 1));
    words.insert(comptime!(2 * word), word_0 & bits_0);
    words.insert(comptime!(2 * word + 1), word_1 & bits_1);
    words
}

/// A bit for every lane of the warp that says so.
#[cube]
fn ballot(says: bool) -> u32 {
    plane_ballot(says).extract(0usize)
}

/// Pairs of registers that the keys of a word of the mask take: two rows, and a quarter of the columns.
pub(crate) const PAIRS_PER_WORD: usize = 8;
