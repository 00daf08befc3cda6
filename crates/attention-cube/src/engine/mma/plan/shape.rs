//! A row of the tables of the forward's tiles: what of them is chosen, and for which widths.

use super::ForwardTiles;
use super::split_d::SplitDTiles;
use super::split_m::SplitMTiles;
use super::split_n::SplitNTiles;
use cube_kit::hopper::Half;

/// The part of [`SplitMTiles`] that is chosen.
pub(super) struct SplitMShape {
    /// The widest keys and values it is for.
    head_dim: usize,
    value_dim: usize,
    warps: usize,
    fragments: usize,
    keys: usize,
}

pub(super) const fn split_m(
    [head_dim, value_dim]: [usize; 2],
    [warps, fragments, keys]: [usize; 3],
) -> Shape {
    Shape::M(SplitMShape {
        head_dim,
        value_dim,
        warps,
        fragments,
        keys,
    })
}

/// The part of [`SplitDTiles`] that is chosen.
pub(super) struct SplitDShape {
    /// The widest keys and values it is for.
    head_dim: usize,
    value_dim: usize,
    rows: usize,
    keys: usize,
    row_groups: usize,
    key_columns: usize,
    value_keys: usize,
    value_parts: usize,
    slots: usize,
    shares: usize,
    holds_queries: bool,
}

pub(super) const fn split_d(
    [head_dim, value_dim]: [usize; 2],
    [rows, keys, row_groups]: [usize; 3],
    [key_columns, value_keys, value_parts, slots, shares]: [usize; 5],
) -> Shape {
    Shape::D(SplitDShape {
        head_dim,
        value_dim,
        rows,
        keys,
        row_groups,
        key_columns,
        value_keys,
        value_parts,
        slots,
        shares,
        holds_queries: true,
    })
}

/// The same whose queries come again with every block's keys.
pub(super) const fn without_queries(shape: Shape) -> Shape {
    match shape {
        Shape::D(shape) => Shape::D(SplitDShape {
            holds_queries: false,
            ..shape
        }),
        other => other,
    }
}

/// The part of [`SplitNTiles`] that is chosen.
pub(super) struct SplitNShape {
    /// The widest keys and values it is for.
    head_dim: usize,
    value_dim: usize,
    fragments: usize,
    column_groups: usize,
    key_groups: usize,
    keys: usize,
    stages: usize,
    /// Cubes that a multiprocessor has room for, where the tiles are chosen.
    cubes: usize,
    reads_words: bool,
}

pub(super) const fn split_n(
    [head_dim, value_dim]: [usize; 2],
    [fragments, column_groups, key_groups]: [usize; 3],
    [keys, stages, cubes]: [usize; 3],
) -> Shape {
    Shape::N(SplitNShape {
        head_dim,
        value_dim,
        fragments,
        column_groups,
        key_groups,
        keys,
        stages,
        cubes,
        reads_words: false,
    })
}

/// The same, for keys and values of int8.
pub(super) const fn split_n_of_words(
    widest: [usize; 2],
    warps: [usize; 3],
    blocks: [usize; 3],
) -> Shape {
    match split_n(widest, warps, blocks) {
        Shape::N(shape) => Shape::N(SplitNShape {
            reads_words: true,
            ..shape
        }),
        other => other,
    }
}

/// Tiles of any kind.
pub(super) enum Shape {
    M(SplitMShape),
    N(SplitNShape),
    D(SplitDShape),
}

impl Shape {
    /// The widest keys and values it is for.
    pub(super) const fn widest(&self) -> (usize, usize) {
        match self {
            Self::M(shape) => (shape.head_dim, shape.value_dim),
            Self::N(shape) => (shape.head_dim, shape.value_dim),
            Self::D(shape) => (shape.head_dim, shape.value_dim),
        }
    }

    /// Whether it is wide enough.
    pub(super) fn is_for(&self, head_dim: usize, value_dim: usize) -> bool {
        let (widest_head, widest_value) = self.widest();
        head_dim <= widest_head && value_dim <= widest_value
    }

    /// The tiles for operands of this width.
    pub(super) fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> ForwardTiles {
        match self {
            Self::M(shape) => ForwardTiles::SplitM(shape.tiles(head_dim, value_dim, half)),
            Self::N(shape) => ForwardTiles::SplitN(SplitNTiles {
                head_dim,
                value_dim,
                half,
                fragments: shape.fragments,
                key_groups: shape.key_groups,
                column_groups: shape.column_groups,
                keys: shape.keys,
                stages: shape.stages,
                reads_words: shape.reads_words,
            }),
            Self::D(shape) => ForwardTiles::SplitD(shape.tiles(head_dim, value_dim, half)),
        }
    }

    /// Cubes that should fit a multiprocessor.
    pub(super) fn cubes(&self) -> usize {
        match self {
            Self::N(shape) => shape.cubes,
            Self::M(_) | Self::D(_) => 1,
        }
    }
}

impl SplitMShape {
    fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> SplitMTiles {
        SplitMTiles {
            head_dim,
            value_dim,
            half,
            warps: self.warps,
            fragments: self.fragments,
            keys: self.keys,
        }
    }
}

impl SplitDShape {
    fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> SplitDTiles {
        let tiles = SplitDTiles {
            head_dim,
            value_dim,
            half,
            rows: self.rows,
            keys: self.keys,
            row_groups: self.row_groups,
            key_columns: self.key_columns,
            value_keys: self.value_keys,
            value_parts: self.value_parts,
            slots: self.slots,
            shares: self.shares,
            holds_queries: self.holds_queries,
        };
        // Of narrow operands a pass has few chunks. It can fill slots of itself and of the next one.
        SplitDTiles {
            slots: tiles.slots.min(tiles.chunks() + 1),
            ..tiles
        }
    }
}
