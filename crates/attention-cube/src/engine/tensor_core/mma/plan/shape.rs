//! A row in a table of forward tiles. The row has measured sizes of a kernel's tiles, and the largest head sizes that
//! the row serves.

use super::split_d::MmaSplitDTiles;
use super::split_m::MmaSplitMTiles;
use super::split_n::MmaSplitNTiles;
use super::tiles::MmaForwardTiles;
use crate::types::quantized::CodeFormat;
use cube_kit::nvidia::Half;

/// The sizes that a table row chooses for [`MmaSplitMTiles`].
pub(super) struct SplitMShape {
    /// The largest head size of Q and K, and the largest head size of V, that the table row serves.
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

/// The sizes that a table row chooses for [`MmaSplitDTiles`].
pub(super) struct SplitDShape {
    /// The largest head size of Q and K, and the largest head size of V, that the table row serves.
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

/// Returns a copy of `shape` whose kernel does not keep the queries in shared memory. The kernel copies the queries
/// there again for every block of keys.
pub(super) const fn without_queries(shape: Shape) -> Shape {
    match shape {
        Shape::D(shape) => Shape::D(SplitDShape {
            holds_queries: false,
            ..shape
        }),
        other => other,
    }
}

/// The sizes that a table row chooses for [`MmaSplitNTiles`].
pub(super) struct SplitNShape {
    /// The largest head size of Q and K, and the largest head size of V, that the table row serves.
    head_dim: usize,
    value_dim: usize,
    fragments: usize,
    column_groups: usize,
    key_groups: usize,
    keys: usize,
    stages: usize,
    /// The number of CTAs that must run at once on a multiprocessor. If the device's multiprocessor runs fewer, the
    /// plan skips this table row.
    cubes: usize,
    codes: Option<CodeFormat>,
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
        codes: None,
    })
}

/// Returns a split-N shape for quantized keys and values.
pub(super) const fn split_n_codes(
    widest: [usize; 2],
    warps: [usize; 3],
    blocks: [usize; 3],
) -> Shape {
    match split_n(widest, warps, blocks) {
        Shape::N(shape) => Shape::N(SplitNShape {
            codes: Some(CodeFormat::Int8),
            ..shape
        }),
        other => other,
    }
}

/// A row of a table: the sizes of the tiles of a split-M, split-N or split-D kernel.
pub(super) enum Shape {
    M(SplitMShape),
    N(SplitNShape),
    D(SplitDShape),
}

impl Shape {
    /// The largest head size of Q and K, and the largest head size of V, that the table row serves.
    pub(super) const fn widest(&self) -> (usize, usize) {
        match self {
            Self::M(shape) => (shape.head_dim, shape.value_dim),
            Self::N(shape) => (shape.head_dim, shape.value_dim),
            Self::D(shape) => (shape.head_dim, shape.value_dim),
        }
    }

    /// True if the table row serves these head sizes.
    pub(super) fn is_for(&self, head_dim: usize, value_dim: usize) -> bool {
        let (widest_head, widest_value) = self.widest();
        head_dim <= widest_head && value_dim <= widest_value
    }

    /// Returns the tiles for operands of these head sizes.
    pub(super) fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> MmaForwardTiles {
        match self {
            Self::M(shape) => MmaForwardTiles::SplitM(shape.tiles(head_dim, value_dim, half)),
            Self::N(shape) => MmaForwardTiles::SplitN(MmaSplitNTiles {
                head_dim,
                value_dim,
                half,
                fragments: shape.fragments,
                key_groups: shape.key_groups,
                column_groups: shape.column_groups,
                keys: shape.keys,
                stages: shape.stages,
                codes: shape.codes,
            }),
            Self::D(shape) => MmaForwardTiles::SplitD(shape.tiles(head_dim, value_dim, half)),
        }
    }

    /// The number of CTAs that must run at once on a multiprocessor. If the device's multiprocessor runs fewer, the
    /// plan skips this table row.
    pub(super) fn cubes(&self) -> usize {
        match self {
            Self::N(shape) => shape.cubes,
            Self::M(_) | Self::D(_) => 1,
        }
    }
}

impl SplitMShape {
    fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> MmaSplitMTiles {
        MmaSplitMTiles {
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
    fn tiles(&self, head_dim: usize, value_dim: usize, half: Half) -> MmaSplitDTiles {
        let tiles = MmaSplitDTiles {
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
        // A pass (main loop iteration) starts to copy only its own chunks and the chunks of the next pass. More than
        // `chunks + 1` slots of the ring buffer would therefore stay unused.
        MmaSplitDTiles {
            slots: tiles.slots.min(tiles.chunks() + 1),
            ..tiles
        }
    }
}
