//! The tiles of the `wgmma` engine's forward, and the shapes of its GEMMs with chunked operands.
//!
//! A *subtile* is 64 columns of a half-precision matrix in shared memory, so each row of a subtile has 128 bytes. In
//! split-D, a *chunk* is some rows or columns of a block, as many as fill one stage of the ring.

mod shapes;
mod split_d;
mod split_m;

pub use self::shapes::{ChunkedProduct, ChunkedScores, OutputShape, RingShape};
pub(super) use self::shapes::{SHARED_MEMORY, USED_WORDS};
pub use self::split_d::WgmmaSplitDTiles;
pub use self::split_m::WgmmaSplitMTiles;

/// The fewest keys in a TMA box of a page. Smaller boxes would take too many copies.
const LEAST_BOX: usize = 16;

/// Returns the number of keys in a TMA box. A block of `rows` keys consists of boxes, and each box lies in one page of
/// `page_len` keys. If `page_len` is 0, the keys do not lie in pages, and one box has all rows.
pub(crate) const fn box_rows(rows: usize, page_len: usize) -> usize {
    let (mut divisor, mut rest) = (rows, page_len);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    divisor
}

/// The division of a forward tile among the warpgroups of a CTA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WgmmaForwardTiles {
    /// Split-M: each warpgroup has some rows of the tile, and computes all columns of the output of these rows.
    SplitM(WgmmaSplitMTiles),
    /// Split-D: each warpgroup has all rows of the tile, and computes half of the columns of the output.
    SplitD(WgmmaSplitDTiles),
}

impl WgmmaForwardTiles {
    /// The number of queries in a tile.
    pub const fn rows(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.rows(),
            Self::SplitD(_) => WgmmaSplitDTiles::ROWS,
        }
    }

    /// The number of keys in a block.
    pub const fn keys(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.keys,
            Self::SplitD(_) => WgmmaSplitDTiles::KEYS,
        }
    }

    /// True if TMA can read K and V from pages of `page_len` keys without a copy. A box has whole groups of 8 rows, after
    /// which the swizzle of shared memory repeats.
    pub(crate) const fn reads_pages(&self, page_len: usize) -> bool {
        let rows = match self {
            Self::SplitM(tiles) => tiles.keys,
            Self::SplitD(_) => WgmmaSplitDTiles::VALUE_KEYS,
        };
        let of_box = box_rows(rows, page_len);
        of_box >= LEAST_BOX && of_box.is_multiple_of(8)
    }

    /// True if the shape of the tiles allows TMA to store the output. The launch uses TMA only if, in addition, each
    /// tile has one head and the keys are not split (split-KV).
    pub const fn stores_output_by_tma(&self) -> bool {
        match self {
            Self::SplitM(tiles) => tiles.stores_output_by_tma(),
            Self::SplitD(tiles) => tiles.stores_output_by_tma(),
        }
    }

    /// The bytes of shared memory that a CTA uses.
    pub const fn shared_memory(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.shared_memory(),
            Self::SplitD(tiles) => tiles.shared_memory(),
        }
    }

    /// The number of threads in a CTA.
    pub const fn units(&self) -> usize {
        match self {
            Self::SplitM(tiles) => tiles.units(),
            Self::SplitD(_) => WgmmaSplitDTiles::UNITS,
        }
    }
}
