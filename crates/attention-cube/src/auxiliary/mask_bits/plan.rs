//! The layout of a packed mask in one buffer of 32-bit words: the bits of all mask rows, then the summaries of all blocks.

use crate::math::side::Side;
use crate::problem::AttentionProblem;
use crate::types::refusal::Refusal;

/// The number of 32-bit words that one plane packs.
pub(crate) const WORDS_PER_PLANE: usize = 16;

/// The largest number of words that a u32 offset in a kernel can address.
const MOST_WORDS: usize = u32::MAX as usize;

/// The rows that share a summary of the mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "only the tensor-core engines pack masks")
)]
pub(crate) enum MaskTile {
    /// A tile has this number of neighboring rows of one head.
    Rows(usize),
    /// A tile has all rows of this number of neighboring heads, all from one GQA group. Only a block mask has summaries
    /// for such tiles.
    Heads(usize),
}

/// The layout of a packed mask: first the words of all mask rows, then one summary word per pair of a tile and a block.
/// A tile is a group of consecutive rows, and a block is a group of consecutive columns.
///
/// If the rows are queries, the columns are keys. If the rows are keys, the columns are queries. All broadcast
/// dimensions except the columns are stored only once.
///
/// A block mask has one row per block of rows, and one bit per block of columns. Its words have no gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MaskWords {
    pub batch: usize,
    pub heads: usize,
    pub rows: usize,
    /// The number of pieces per mask row. One plane packs one piece of [`WORDS_PER_PLANE`] words.
    pub pieces: usize,
    /// The number of tiles per head, or 0 if the layout has no summaries. Each tile has one summary per block.
    pub tiles: usize,
    /// The number of blocks per mask row.
    pub blocks: usize,
}

impl MaskWords {
    /// Plans the layout of a mask `[batch, heads, queries, keys]`. If `side` is queries, a row of the packed mask is
    /// the mask's row of one query. If `side` is keys, a row of the packed mask is the mask's column of one key. Blocks
    /// have `block_columns` columns.
    pub fn new(
        [batch, heads, queries, keys]: [usize; 4],
        problem: &AttentionProblem,
        side: Side,
        tile: MaskTile,
        block_columns: usize,
    ) -> Self {
        let [of_queries, of_keys] = problem.mask_block;
        let (rows, all_rows, columns, column_size) = match side {
            Side::Queries => (queries, problem.q_len, problem.kv_len, of_keys),
            Side::Keys => (keys, problem.kv_len, problem.q_len, of_queries),
        };
        let blocks = columns.div_ceil(block_columns);
        let words = match problem.has_block_mask() {
            true => columns.div_ceil(column_size).div_ceil(32),
            false => blocks * block_columns.div_ceil(32),
        };
        Self {
            batch,
            heads,
            rows,
            pieces: words.div_ceil(WORDS_PER_PLANE),
            tiles: match tile {
                MaskTile::Rows(_) if rows == 1 => 1,
                MaskTile::Rows(tile_rows) => all_rows.div_ceil(tile_rows),
                MaskTile::Heads(_) => usize::from(problem.has_block_mask()),
            },
            blocks,
        }
    }

    /// Returns the number of 32-bit words per mask row.
    #[cfg(any(test, feature = "cuda"))]
    pub fn of_row(&self) -> usize {
        self.pieces * WORDS_PER_PLANE
    }

    /// Returns the number of pieces in all mask rows together. One plane packs one piece of [`WORDS_PER_PLANE`] words.
    pub fn all_pieces(&self) -> usize {
        self.batch * self.heads * self.rows * self.pieces
    }

    /// Returns the number of 32-bit words in all mask rows together, which is also the offset of the first summary.
    pub fn of_rows(&self) -> usize {
        self.all_pieces() * WORDS_PER_PLANE
    }

    /// Returns the number of pairs of a tile and a block in the whole mask. Each pair has one summary word.
    pub fn pairs(&self) -> usize {
        self.batch * self.heads * self.tiles * self.blocks
    }

    /// Returns the number of 32-bit words of the whole packed mask.
    pub fn all(&self) -> usize {
        self.of_rows() + self.pairs()
    }

    /// Returns the offsets in the order of the fields of `MaskOffsets`. [`check_mask`] has checked that the offsets fit u32.
    #[cfg(any(test, feature = "cuda"))]
    pub fn offsets(&self) -> [u32; 7] {
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

/// Refuses a mask that packs to more words than the kernels can index. Each entry of `packed` describes one packed copy
/// of the mask. An entry holds the side of the rows (queries or keys), the rows per tile, and the columns per block.
pub(crate) fn check_mask(
    problem: &AttentionProblem,
    packed: impl IntoIterator<Item = (Side, usize, usize)>,
) -> Result<(), Refusal> {
    let Some(shape) = problem.mask else {
        return Ok(());
    };
    for (side, tile_rows, block_columns) in packed {
        let tile = MaskTile::Rows(tile_rows);
        let words = MaskWords::new(shape, problem, side, tile, block_columns).all();
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

    /// Checks that the bits of the last row end at the first summary, and that the last summary is the last word. The
    /// offsets must fit u32, even for masks with more than 2³² elements.
    #[test]
    fn mask_words_offsets_reach_the_last_word() {
        for (scores, mask) in [
            ([2, 3, 70, 300], [2, 3, 70, 300]),
            ([2, 3, 70, 300], [1, 1, 70, 1]),
            ([5, 1, 32_768, 32_768], [5, 1, 32_768, 32_768]),
            ([1, 3, 65_536, 32_768], [1, 3, 65_536, 32_768]),
            ([1, 60, 32_768, 32_768], [1, 60, 32_768, 32_768]),
        ] {
            for (tile, block_columns) in [
                (MaskTile::Rows(128), 176),
                (MaskTile::Rows(64), 64),
                (MaskTile::Heads(3), 128),
            ] {
                for side in [Side::Queries, Side::Keys] {
                    let problem = problem(scores);
                    let words = MaskWords::new(mask, &problem, side, tile, block_columns);
                    let context = format!("{mask:?}: {words:?}");
                    assert!(words.all() <= MOST_WORDS, "{context}");
                    let columns = match side {
                        Side::Queries => problem.kv_len,
                        Side::Keys => problem.q_len,
                    };
                    assert!(words.of_row() * 32 >= columns, "{context}");
                    let last =
                        |index: usize, size: usize| words.offsets()[index] as usize * (size - 1);
                    let row = last(0, words.batch) + last(1, words.heads) + last(2, words.rows);
                    assert_eq!(row + words.of_row(), words.of_rows(), "{context}");
                    assert_eq!(words.offsets()[3] as usize, words.of_rows(), "{context}");
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
