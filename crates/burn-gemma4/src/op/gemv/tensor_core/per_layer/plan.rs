//! Divides a layer's per-layer embedding block among the cubes and warps of a cluster.

use super::super::super::sums::ProjectPlan;
use super::super::codes::Codes;
use super::super::plan::WARP;
use super::super::staged::{Staging, TILE};
use crate::op::sums::Team;
use cube_kit::ampere::cp_async::PIECE;
use cube_kit::ampere::gemv::PRODUCT_ROWS;
use cubecl::prelude::CubeDim;
use std::ops::RangeInclusive;

/// The number of cubes in a cluster. All GPUs with clusters support 8. More cubes share the work, but 16 need a special
/// permission.
pub(super) const CUBES: usize = 8;

/// The largest number of clusters, unless each has [`TILE`] rows. A Hopper GPU runs that many at once. With fewer rows in a
/// cluster, more warps share a row.
const CLUSTERS: usize = 8;

/// The number of gate outputs of a cube. Every warp of the cube multiplies a part of their columns.
pub(super) const GATES: usize = 32;

/// The numbers of warps in a cube. Each of up to 8 input rows has one warp or more.
const WARPS: RangeInclusive<usize> = TILE..=16;

/// The number of barriers at which a cube waits for data of other cubes.
pub(super) const BARRIERS: usize = 3;

/// The number of bytes after each row in shared memory. A row has a multiple of 128 bytes. With this distance, rows that
/// a warp reads at once lie in different banks.
const PADDING: usize = 64;

/// The number of f32 after each row of the projection's outputs in shared memory, so that the four pairs of rows that a
/// warp writes at once lie in different banks.
const OUTPUT_PADDING: usize = 4;

/// The division of rows among the warps of a cube. Each group of a row is summed on its own, so that sums do not depend
/// on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct RowGroups {
    /// The number of groups of neighboring columns in a row.
    pub groups: usize,
    /// The number of warps that share a row.
    pub warps: usize,
}

impl RowGroups {
    const fn new(plan: &BlockPlan, groups: usize) -> Self {
        let of_row = plan.warps / plan.rows;
        let warps = if of_row < groups { of_row } else { groups };
        Self { groups, warps }
    }

    /// The largest number of groups of a warp.
    pub const fn held(&self) -> usize {
        self.groups.div_ceil(self.warps)
    }
}

/// The division of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct BlockPlan {
    /// The number of input rows that a cluster computes, at most 8.
    pub rows: usize,
    /// The number of columns of the residual stream.
    pub columns: usize,
    /// The number of columns of a layer's embedding.
    pub embedding: usize,
    /// The number of warps in a cube.
    pub warps: usize,
    /// The number of weight rows of the projection that a warp multiplies.
    pub projection_weights: usize,
    pub gate_codes: Codes,
    pub projection_codes: Codes,
    pub pdl: bool,
}

impl BlockPlan {
    /// Returns the division for rows of `columns` columns and a layer's embedding of `embedding` columns, or `None` if
    /// the kernel does not support the shape.
    pub fn new(
        rows: usize,
        [columns, embedding]: [usize; 2],
        [gate_codes, projection_codes]: [Codes; 2],
        pdl: bool,
    ) -> Option<Self> {
        let own = columns / CUBES;
        let weights = [2 * PRODUCT_ROWS, 4 * PRODUCT_ROWS];
        let weights = weights
            .into_iter()
            .find(|weights| own.is_multiple_of(*weights) && WARPS.contains(&(own / weights)))?;
        let is_whole = rows > 0
            && embedding == CUBES * GATES
            && columns.is_multiple_of(WARP * PIECE)
            && columns.is_multiple_of(CUBES * 2 * WARP);
        is_whole.then_some(Self {
            rows: rows.div_ceil(CLUSTERS).min(TILE),
            columns,
            embedding,
            warps: own / weights,
            projection_weights: weights,
            gate_codes,
            projection_codes,
            pdl,
        })
    }

    /// The cubes of a cluster, which together compute up to 8 rows.
    pub const fn cluster(&self) -> CubeDim {
        CubeDim::new_1d(CUBES as u32)
    }

    pub const fn units(&self) -> usize {
        self.warps * WARP
    }

    /// The number of columns of the residual stream whose sums a cube computes.
    pub const fn own_columns(&self) -> usize {
        self.columns / CUBES
    }

    /// The division of the residual stream's rows among warps. A group is the vectors of 16 bytes that a warp reads at
    /// once.
    pub const fn stream_rows(&self) -> RowGroups {
        RowGroups::new(self, self.columns / (WARP * PIECE))
    }

    /// The division of the cube's columns of a row among warps. A group is the pairs of neighboring columns that a warp
    /// has at once.
    pub const fn own_rows(&self) -> RowGroups {
        RowGroups::new(self, self.own_columns() / (2 * WARP))
    }

    /// The distance between rows of the residual stream in shared memory, in bytes.
    pub const fn row_bytes(&self) -> usize {
        2 * self.columns + PADDING
    }

    /// The distance between rows of the gate's outputs in shared memory, in bytes.
    pub const fn gated_bytes(&self) -> usize {
        2 * self.embedding + PADDING
    }

    /// The distance between rows of the projection's outputs in shared memory, in bytes.
    pub const fn output_bytes(&self) -> usize {
        4 * (self.own_columns() + OUTPUT_PADDING)
    }

    /// The stages of the gate's weights, of which all warps of a cube have a part.
    pub fn gate_staging(&self) -> Staging {
        Staging::new(self.gate_codes, self.columns).with_shared_input()
    }

    /// The stages of the projection's weights. A warp has all stages of its weight rows.
    pub fn projection_staging(&self) -> Staging {
        Staging::new(self.projection_codes, self.embedding).with_shared_input()
    }

    /// The division of the gate's GEMM. The rings hold all weights of a cube.
    pub fn gate(&self) -> ProjectPlan {
        let stages = self.columns.div_ceil(self.gate_staging().columns());
        ProjectPlan {
            outputs: GATES,
            team: Team {
                units: self.units(),
                width: WARP,
            },
            unroll: stages.div_ceil(self.warps),
            ..self.gemm()
        }
    }

    /// The division of the projection's GEMM. The rings hold all weights of a cube.
    pub fn projection(&self) -> ProjectPlan {
        ProjectPlan {
            outputs: self.projection_weights,
            team: Team {
                units: WARP,
                width: WARP,
            },
            unroll: self.embedding.div_ceil(self.projection_staging().columns()),
            ..self.gemm()
        }
    }

    fn gemm(&self) -> ProjectPlan {
        ProjectPlan {
            rows: self.rows,
            outputs: 0,
            gated: false,
            team: Team {
                units: WARP,
                width: WARP,
            },
            teams: 1,
            ranks: 0,
            sides: 1,
            unroll: 1,
            is_padded: false,
            pdl: self.pdl,
            reads_ahead: self.pdl,
        }
    }

    /// The number of words of the rings of both GEMMs.
    pub fn ring_words(&self) -> usize {
        self.projection_rings_at() / 4
            + self.warps * self.projection_staging().warp_bytes(self.projection()) / 4
    }

    /// The offset of the projection's rings behind those of the gate, in bytes.
    pub fn projection_rings_at(&self) -> usize {
        self.warps * self.gate_staging().warp_bytes(self.gate())
    }

    /// The number of sums of squares of a row of the cube's columns, over all cubes.
    pub const fn squares(&self) -> usize {
        CUBES * self.own_rows().groups
    }

    /// The number of words of the sums of squares: those of the residual stream, and those of both later norms.
    pub const fn squares_words(&self) -> usize {
        TILE * (self.stream_rows().groups + 2 * self.squares())
    }

    /// The shared memory of a cube in bytes.
    pub fn shared_memory(&self) -> usize {
        let rows = self.row_bytes() + self.gated_bytes() + self.output_bytes();
        4 * (self.ring_words() + self.gate().partials() + self.squares_words() + 2 * BARRIERS)
            + TILE * rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cube_kit::nvidia::Half;

    /// The shared memory of a cube on Hopper, in bytes.
    const SHARED_MEMORY: usize = 227 << 10;

    fn of(columns: usize, embedding: usize, bits: usize) -> Option<BlockPlan> {
        let codes = Codes {
            bits,
            half: Half::Bf16,
        };
        BlockPlan::new(8, [columns, embedding], [codes; 2], true)
    }

    #[test]
    fn plans_of_e2b_and_of_e4b_in_4_bits_fit_into_shared_memory() {
        for (columns, bits, warps, is_served) in [
            (1536, 4, 12, true),
            (1536, 8, 12, true),
            (2560, 4, 10, true),
            (2560, 8, 10, false),
        ] {
            let plan = of(columns, 256, bits).expect("the shape is divisible");
            assert_eq!(plan.warps, warps);
            assert_eq!(plan.shared_memory() <= SHARED_MEMORY, is_served, "{plan:?}");
            let places = [plan.projection_rings_at(), 4 * plan.ring_words()];
            assert!(places.iter().all(|place| place.is_multiple_of(16)));
        }
    }

    #[test]
    fn plan_of_unsupported_shapes_gives_none() {
        for (columns, embedding) in [(1536, 128), (1600, 256), (1536, 250), (256, 256), (0, 256)] {
            assert!(of(columns, embedding, 4).is_none());
        }
    }
}
