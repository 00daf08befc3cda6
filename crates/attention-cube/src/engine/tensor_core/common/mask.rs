//! Visibility bits of a fragment. Each bit belongs to one row and one column of the fragment. The bit tells whether
//! mask, segments and key intervals leave the column visible to the row. A *mask word* holds the bits of one row for 32
//! columns.

use super::scoring::Masking;
use super::{FragmentKind, Known, RowPair, columns_end, rows_end};
use crate::auxiliary::mask_bits::kernel::{bits_of_run, word_of};
use crate::math::side::Side;
use crate::math::visibility::{Documents, Keys, id_of, interval_of};
use cubecl::prelude::*;

/// Two words of visibility bits, one for each of the thread's two rows.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct BitPair {
    pub first: u32,
    pub second: u32,
}

/// Returns the visibility bits of the thread's two rows for columns `32 · word` to `32 · word + 31` of the fragment.
/// The thread holds only some of these 32 columns. Each word is shifted so that bit 0 belongs to the first column that
/// the thread holds.
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

/// The mask words of a thread's two rows, for up to 128 columns. A column has one bit in the words of each row. The bit
/// is set if mask, segments and key intervals leave the column visible to the row. Word `2i` covers 32 columns of the
/// first row, and word `2i + 1` the same columns of the second row.
pub(crate) type MaskWords = Vector<u32, Const<8>>;

/// Loads the mask words of a thread's two rows for `columns` columns. The first column is column `32 · first_word` of a
/// block of `size` columns. Without a block mask, the words in memory start at word `row_word` of the row.
///
/// If the problem has no mask, or if the block is fully visible (`whole`), the words stay 0 and have no meaning.
#[cube]
#[allow(
    clippy::collapsible_if,
    reason = "the outer condition is evaluated at compile time, the inner at run time"
)]
pub(crate) fn mask_words(
    masking: &Masking,
    rows: &RowPair,
    row_word: u32,
    block: i32,
    first_word: u32,
    whole: bool,
    #[comptime] size: usize,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> MaskWords {
    let mut words = Vector::<u32, Const<8>>::zeroed();
    if comptime!(kind.structure.mask) {
        if !whole {
            let last_row = rows_end(&masking.seq_lens, kind.side) - 1i32;
            let row_0 = min(rows.position_0, last_row) as u32;
            let row_1 = min(rows.position_1, last_row) as u32;
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                let at = if comptime!(kind.structure.has_block_mask()) {
                    let first = block * comptime!(size as i32) + (first_word * 32u32) as i32;
                    (first + comptime!(32 * word as i32)) as u32
                } else {
                    row_word + comptime!(word as u32)
                };
                let own_0 = mask_word(masking, rows.batch, rows.head_0, row_0, at, kind);
                let own_1 = mask_word(masking, rows.batch, rows.head_1, row_1, at, kind);
                words.insert(comptime!(2 * word), own_0);
                words.insert(comptime!(2 * word + 1), own_1);
            }
        }
    }
    words
}

/// Returns a word of the mask for 32 columns of a row. `at` is the index of the word in the row. With a block mask,
/// `at` is the first of the 32 columns.
#[cube]
fn mask_word(
    masking: &Masking,
    batch: u32,
    head: u32,
    row: u32,
    at: u32,
    #[comptime] kind: FragmentKind,
) -> u32 {
    let structure = comptime!(kind.structure);
    if comptime!(structure.has_block_mask()) {
        let element = comptime!(structure.mask_element(kind.side));
        word_of_blocks(
            masking,
            batch,
            head,
            row / comptime!(element[0] as u32),
            at as i32,
            comptime!(element[1]),
            kind.side,
        )
    } else {
        word_of(&masking.mask, &masking.mask_offsets, batch, head, row, at)
    }
}

/// Returns a word with one bit for each of the 32 columns from `first_column` on. The bit of a column is set if the
/// block mask shows the column's block to the row of elements `row`. An element of the mask covers `size` columns.
#[cube]
fn word_of_blocks(
    masking: &Masking,
    batch: u32,
    head: u32,
    row: u32,
    first_column: i32,
    #[comptime] size: usize,
    #[comptime] side: Side,
) -> u32 {
    let mask = &masking.mask;
    let offsets = &masking.mask_offsets;
    let last = (columns_end(&masking.seq_lens, side) - 1i32) / comptime!(size as i32);
    if comptime!(size == 1) {
        // The bits of the 32 columns are neighbors in one word or in two.
        let at = min(first_column, last) as u32 / 32u32;
        let next = min(at + 1u32, last as u32 / 32u32);
        let low = word_of(mask, offsets, batch, head, row, at);
        let high = word_of(mask, offsets, batch, head, row, next);
        let both = u64::cast_from(high) << 32u64 | u64::cast_from(low);
        u32::cast_from(both >> u64::cast_from(first_column as u32 % 32u32))
    } else {
        let size = comptime!(size as i32);
        let mut bits = 0u32.runtime();
        #[unroll]
        for element in 0..comptime!(31usize.div_ceil(size as usize) + 1) {
            let element = min(first_column / size + comptime!(element as i32), last);
            let word = word_of(mask, offsets, batch, head, row, element as u32 / 32u32);
            let columns = Keys {
                first: element * size,
                end: (element + 1i32) * size,
            };
            let shown = word >> (element as u32 % 32u32) & 1u32;
            bits |= select(shown == 1u32, bits_of_run(columns, first_column), 0u32);
        }
        bits
    }
}

/// Clears the bits of columns that segments hide from the thread's two rows. A row does not see columns of other
/// segments. The words cover `columns` columns, starting at `first_column`.
///
/// `documents` holds the smallest and the largest segment id of the block. If `share`, all rows of the tile and all
/// columns of the block are in one segment, and no bit is cleared.
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
        let seq_lens = &masking.seq_lens;
        let lengths_and_ids = &masking.lengths_and_ids;
        let side = comptime!(kind.side);
        let other = comptime!(side.other());
        let last_row = rows_end(seq_lens, side) - 1i32;
        let last_column = columns_end(seq_lens, side) - 1i32;
        let id_0 = id_of(
            seq_lens,
            lengths_and_ids,
            rows.batch,
            min(rows.position_0, last_row),
            side,
            kind.structure,
        );
        let id_1 = id_of(
            seq_lens,
            lengths_and_ids,
            rows.batch,
            min(rows.position_1, last_row),
            side,
            kind.structure,
        );
        if documents.first == documents.last {
            let all_0 = select(documents.first == id_0, 0xffff_ffffu32, 0u32);
            let all_1 = select(documents.first == id_1, 0xffff_ffffu32, 0u32);
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                words = restricted(words, all_0, all_1, word);
            }
        } else {
            // Each lane loads the segment ids of columns `lane`, `lane + 32`, and so on. The rows of a warp have few
            // distinct segment ids. The warp loops over these ids, and compares each id with the ids of all columns.
            let lane = UNIT_POS % 32u32;
            let mut ids = Vector::<i32, Const<4>>::zeroed();
            #[unroll]
            for word in 0..columns.div_ceil(32) {
                let column = first_column + lane as i32 + comptime!(32 * word as i32);
                let column = min(column, last_column);
                ids.insert(
                    word,
                    id_of(
                        seq_lens,
                        lengths_and_ids,
                        rows.batch,
                        column,
                        other,
                        kind.structure,
                    ),
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

/// Clears the bits of columns that key intervals hide from the thread's two rows. The words cover `columns` columns,
/// starting at `first_column`.
///
/// If the rows are queries, the columns are keys. If the rows are keys, the columns are queries. If `within`, the
/// intervals of all queries contain the whole block, and no bit is cleared.
#[cube]
pub(crate) fn words_of_intervals(
    words: MaskWords,
    masking: &Masking,
    rows: &RowPair,
    first_column: i32,
    within: bool,
    #[comptime] columns: usize,
    #[comptime] kind: FragmentKind,
) -> MaskWords {
    let mut words = words;
    if comptime!(!kind.structure.mask && !kind.structure.segments) {
        #[unroll]
        for word in 0..comptime!(2 * columns.div_ceil(32)) {
            words.insert(word, 0xffff_ffffu32);
        }
    }
    if !within {
        #[unroll]
        for word in 0..columns.div_ceil(32) {
            let first = first_column + comptime!(32 * word as i32);
            let bits = if comptime!(kind.side == Side::Queries) {
                bits_of_queries(masking, rows, first, kind)
            } else {
                bits_of_keys(masking, rows, first, kind)
            };
            words = restricted(words, bits.first, bits.second, word);
        }
    }
    words
}

/// Returns a word of visibility bits for each of a thread's two queries. Bit `i` is set if an interval of the query contains
/// key `first_key + i`.
#[cube]
fn bits_of_queries(
    masking: &Masking,
    rows: &RowPair,
    first_key: i32,
    #[comptime] kind: FragmentKind,
) -> BitPair {
    // For a row past the last query, read the intervals of the last query. The read then stays inside the buffer.
    let last = rows_end(&masking.seq_lens, kind.side) - 1i32;
    let mut bits = BitPair {
        first: 0u32.runtime(),
        second: 0u32.runtime(),
    };
    #[unroll]
    for interval in 0..kind.structure.intervals {
        let of_first = own_interval(
            masking,
            rows.batch,
            min(rows.position_0, last),
            interval,
            kind,
        );
        let of_second = own_interval(
            masking,
            rows.batch,
            min(rows.position_1, last),
            interval,
            kind,
        );
        bits.first |= bits_of_run(of_first, first_key);
        bits.second |= bits_of_run(of_second, first_key);
    }
    bits
}

/// Returns a word of visibility bits for each of a thread's two keys. Bit `i` is set if an interval of query
/// `first_query + i` contains the key.
///
/// Each lane loads the intervals of one query. A warp has 16 keys: lane `4 · i` holds keys `i` and `i + 8`. For each
/// key of the warp, every lane compares the intervals of its query with the key. A ballot collects the results of all
/// lanes in the key's word.
#[cube]
fn bits_of_keys(
    masking: &Masking,
    rows: &RowPair,
    first_query: i32,
    #[comptime] kind: FragmentKind,
) -> BitPair {
    let lane = UNIT_POS % 32u32;
    let last = columns_end(&masking.seq_lens, kind.side) - 1i32;
    let query = min(first_query + lane as i32, last);
    let keys = own_interval(masking, rows.batch, query, 0usize, kind);
    let others = if comptime!(kind.structure.intervals > 1) {
        own_interval(masking, rows.batch, query, 1usize, kind)
    } else {
        Keys {
            first: 0i32.runtime(),
            end: 0i32.runtime(),
        }
    };
    let mut bits = BitPair {
        first: 0u32.runtime(),
        second: 0u32.runtime(),
    };
    #[unroll]
    for row in 0..8u32 {
        let key_0 = plane_shuffle(rows.position_0, comptime!(4 * row));
        let key_1 = plane_shuffle(rows.position_1, comptime!(4 * row));
        let seen_0 = ballot(contains(keys, key_0) || contains(others, key_0));
        let seen_1 = ballot(contains(keys, key_1) || contains(others, key_1));
        let is_own = lane / 4u32 == row;
        bits.first = select(is_own, seen_0, bits.first);
        bits.second = select(is_own, seen_1, bits.second);
    }
    bits
}

/// Returns the range of keys in the `interval`-th interval of a query.
#[cube]
fn own_interval(
    masking: &Masking,
    batch: u32,
    query: i32,
    #[comptime] interval: usize,
    #[comptime] kind: FragmentKind,
) -> Keys {
    interval_of(
        &masking.seq_lens,
        &masking.lengths_and_ids,
        batch,
        query,
        interval,
        kind.structure,
    )
}

/// True if `key` lies in the range `keys`.
#[cube]
fn contains(keys: Keys, key: i32) -> bool {
    key >= keys.first && key < keys.end
}

/// Clears bits of the two mask words with index `word`. The first row's word keeps only bits that are also set in
/// `bits_0`. The second row's word keeps only bits that are also set in `bits_1`.
#[cube]
fn restricted(words: MaskWords, bits_0: u32, bits_1: u32, #[comptime] word: usize) -> MaskWords {
    let mut words = words;
    let word_0 = words.extract(comptime!(2 * word));
    let word_1 = words.extract(comptime!(2 * word + 1));
    words.insert(comptime!(2 * word), word_0 & bits_0);
    words.insert(comptime!(2 * word + 1), word_1 & bits_1);
    words
}

/// Returns a word with one bit per lane of the warp. A lane's bit is 1 if `says` is true in that lane.
#[cube]
fn ballot(says: bool) -> u32 {
    plane_ballot(says).extract(0usize)
}

/// The number of register pairs that a thread holds in the 32 columns of a mask word: 4 pairs in each of the thread's
/// two rows.
pub(crate) const PAIRS_PER_WORD: usize = 8;
