//! How a mask's bits, and what tiles see of blocks, lie in one buffer of words.

use crate::AttentionProblem;
use crate::math::side::Side;
use crate::select::Refusal;

/// Words that a plane packs.
pub(crate) const WORDS_PER_PLANE: usize = 16;

/// Words that the kernels' places in the buffer reach.
const MOST_WORDS: usize = u32::MAX as usize;

/// The words of a packed mask: those of its rows first, then what tiles see of blocks. Rows are queries or keys, columns the
/// others; what the mask is broadcast along, but for columns, is there once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaskWords {
    pub batch: usize,
    pub heads: usize,
    pub rows: usize,
    /// Of a row, in pieces that a plane packs each.
    pub pieces: usize,
    /// Of a head; 0 where they are not told what they see of blocks.
    pub tiles: usize,
    /// Of a row.
    pub blocks: usize,
}

impl MaskWords {
    /// Of a mask of this shape, for tiles of `tile_rows` rows of `side` and blocks of `block_columns` of the other; without
    /// `tile_rows` tiles are not told what they see of blocks.
    pub fn new(
        [batch, heads, queries, keys]: [usize; 4],
        problem: &AttentionProblem,
        side: Side,
        tile_rows: Option<usize>,
        block_columns: usize,
    ) -> Self {
        let (rows, columns) = match side {
            Side::Queries => (queries, problem.kv_len),
            Side::Keys => (keys, problem.q_len),
        };
        let blocks = columns.div_ceil(block_columns);
        Self {
            batch,
            heads,
            rows,
            pieces: (blocks * block_columns.div_ceil(32)).div_ceil(WORDS_PER_PLANE),
            tiles: tile_rows.map_or(0, |tile_rows| rows.div_ceil(tile_rows)),
            blocks,
        }
    }

    /// Of a row.
    #[cfg(any(test, feature = "cuda"))]
    pub fn of_row(&self) -> usize {
        self.pieces * WORDS_PER_PLANE
    }

    /// Pieces of all rows.
    pub fn all_pieces(&self) -> usize {
        self.batch * self.heads * self.rows * self.pieces
    }

    /// Where the words about blocks start.
    pub fn of_rows(&self) -> usize {
        self.all_pieces() * WORDS_PER_PLANE
    }

    /// Pairs of a tile and a block, which have a word each.
    pub fn pairs(&self) -> usize {
        self.batch * self.heads * self.tiles * self.blocks
    }

    /// All of them.
    pub fn all(&self) -> usize {
        self.of_rows() + self.pairs()
    }

    /// In the order of `MaskPlaces`, which [`check_mask`] has found to hold them.
    #[cfg(any(test, feature = "cuda"))]
    pub fn places(&self) -> [u32; 7] {
        let step = |size: usize, step: usize| if size == 1 { 0 } else { step as u32 };
        let (row, tile) = (self.of_row(), self.blocks);
        [
            step(self.batch, self.heads * self.rows * row),
            step(self.heads, self.rows * row),
            step(self.rows, row),
            self.of_rows() as u32,
            step(self.batch, self.heads * self.tiles * tile),
            step(self.heads, self.tiles * tile),
            step(self.rows, tile),
        ]
    }
}

/// Refuses masks whose words the kernels could not count, packed for these rows of a side and columns of a block.
pub(crate) fn check_mask(
    problem: &AttentionProblem,
    packed: impl IntoIterator<Item = (Side, usize, usize)>,
) -> Result<(), Refusal> {
    let Some(shape) = problem.mask else {
        return Ok(());
    };
    for (side, tile_rows, block_columns) in packed {
        let words = MaskWords::new(shape, problem, side, Some(tile_rows), block_columns).all();
        if words > MOST_WORDS {
            return Err(Refusal::MaskWords {
                words,
                limit: MOST_WORDS,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn problem([batch, heads, q_len, kv_len]: [usize; 4]) -> AttentionProblem {
        testing::problem([batch, heads, heads, q_len, kv_len, 64])
    }

    /// The last row's bits and the last pair's word are the last of theirs, where the numbers of 32 bits that kernels get hold
    /// the places; also of masks of more elements than 32 bits count.
    #[test]
    fn places_are_those_of_the_words() {
        for (scores, mask) in [
            ([2, 3, 70, 300], [2, 3, 70, 300]),
            ([2, 3, 70, 300], [1, 1, 70, 1]),
            ([5, 1, 32_768, 32_768], [5, 1, 32_768, 32_768]),
            ([1, 3, 65_536, 32_768], [1, 3, 65_536, 32_768]),
            ([1, 60, 32_768, 32_768], [1, 60, 32_768, 32_768]),
        ] {
            for (tile_rows, block_columns) in [(Some(128), 176), (Some(64), 64), (None, 128)] {
                for side in [Side::Queries, Side::Keys] {
                    let problem = problem(scores);
                    let words = MaskWords::new(mask, &problem, side, tile_rows, block_columns);
                    let context = format!("{mask:?}: {words:?}");
                    assert!(words.all() <= MOST_WORDS, "{context}");
                    let columns = match side {
                        Side::Queries => problem.kv_len,
                        Side::Keys => problem.q_len,
                    };
                    assert!(words.of_row() * 32 >= columns, "{context}");
                    let last =
                        |index: usize, size: usize| words.places()[index] as usize * (size - 1);
                    let row = last(0, words.batch) + last(1, words.heads) + last(2, words.rows);
                    assert_eq!(row + words.of_row(), words.of_rows(), "{context}");
                    assert_eq!(words.places()[3] as usize, words.of_rows(), "{context}");
                    if words.tiles > 0 {
                        let tile =
                            last(4, words.batch) + last(5, words.heads) + last(6, words.tiles);
                        assert_eq!(tile + words.blocks, words.pairs(), "{context}");
                    }
                }
            }
        }
    }
}
