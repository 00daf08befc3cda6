//! Quantized weights of a warp, staged through shared memory for tensor cores. The GEMMs of several rows and those of
//! MoE experts use these functions.
//!
//! Algorithm: a warp multiplies all columns of its stages by 16 or 32 weight rows. The warp has a ring buffer of its
//! own in shared memory, into which `cp.async` copies codes and scales. A stage holds 64 bytes of codes per weight row.
//! `ldmatrix` gives the four threads of a weight row the words of the same quantization group, so that the threads need
//! not exchange codes. Two tensor-core instructions sum over one group of 16 weight rows and 8 input rows. The weights
//! are the left operand, and each converted code multiplies all input rows. The sums are multiplied by the group's
//! scales in f32.
//!
//! Schedule: a warp waits only for its own copies, and there is no barrier before the sums are added up. The input of
//! the next group is loaded while a group is multiplied.

mod multiply;
pub(super) mod plan;
mod ring;

use super::super::sums::ProjectPlan;
use super::codes::{Codes, GROUP};
use cube_kit::ampere::cp_async::NARROW_ROW_BYTES;
use cube_kit::ampere::gemv::PRODUCT_ROWS;
pub(super) use multiply::{InputRows, leave_sums, multiply_stages};
pub(super) use ring::{copies_scales, fill_ring, first_code, first_scale, ring_of_warp};

/// The number of bytes of codes of a weight row in a stage. Four threads copy 16 bytes each, and one `ldmatrix` loads
/// the codes of 8 weight rows.
pub(super) const ROW_BYTES: usize = NARROW_ROW_BYTES;
/// The number of bytes of codes of a fragment, which is 8 weight rows, in a stage.
pub(super) const FRAGMENT_BYTES: usize = PRODUCT_ROWS * ROW_BYTES;
/// The number of input rows that one tensor-core instruction multiplies.
pub(super) const TILE: usize = PRODUCT_ROWS;
/// The ring buffer of a warp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Staging {
    pub codes: Codes,
    /// True if a row's last stage is only half full. This is the case if the number of columns is an odd multiple of
    /// 64.
    pub has_half: bool,
    /// The memory of the input rows.
    pub input: InputMemory,
}

/// The memory from which the input rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum InputMemory {
    Global,
    Shared,
}

impl Staging {
    /// Creates the stages of rows of `columns` columns, a multiple of 64.
    pub fn new(codes: Codes, columns: usize) -> Self {
        Self {
            codes,
            has_half: !columns.is_multiple_of(columns_of_stage(codes.bits)),
            input: InputMemory::Global,
        }
    }

    /// Returns these stages for input rows in shared memory.
    pub fn with_shared_input(self) -> Self {
        Self {
            input: InputMemory::Shared,
            ..self
        }
    }

    /// The number of columns in a stage.
    pub const fn columns(self) -> usize {
        columns_of_stage(self.codes.bits)
    }

    /// The number of quantization groups in a stage.
    const fn groups(self) -> usize {
        self.columns() / GROUP
    }

    /// The number of words of codes that a thread has of a group.
    const fn words(self) -> usize {
        self.codes.words() / 2
    }

    /// The number of columns between the inputs of neighboring threads of a row. A thread has 8 columns of a group.
    /// With 8-bit codes, these are 4 columns in each half of the group.
    const fn own_columns(self) -> usize {
        GROUP / 4 / self.words()
    }

    /// The number of bytes of scales of a weight row in a stage.
    const fn scale_bytes(self) -> usize {
        2 * self.groups()
    }

    /// The number of bytes of a fragment in a stage: its codes and its scales.
    pub const fn fragment_bytes(self) -> usize {
        FRAGMENT_BYTES + PRODUCT_ROWS * self.scale_bytes()
    }

    fn stage_bytes(self, plan: ProjectPlan) -> usize {
        plan.fragments() * self.fragment_bytes()
    }

    /// The number of bytes of a warp's ring.
    pub fn warp_bytes(self, plan: ProjectPlan) -> usize {
        plan.unroll * self.stage_bytes(plan)
    }

    /// The shared memory of a cube in bytes: the rings of all warps, and the sums of 16 input rows.
    #[cfg(test)]
    pub fn shared_memory(self, plan: ProjectPlan) -> usize {
        4 * (self.ring_words(plan) + plan.of_row_tile(0).partials())
    }

    /// The number of words of the rings of all warps of a cube.
    pub fn ring_words(self, plan: ProjectPlan) -> usize {
        plan.teams * plan.team.parts() * self.warp_bytes(plan) / size_of::<u32>()
    }
}

/// Returns the number of columns in a stage, for codes of `bits` bits.
pub(super) const fn columns_of_stage(bits: usize) -> usize {
    ROW_BYTES * 8 / bits
}

impl ProjectPlan {
    /// The number of tiles of 8 input rows.
    pub(super) fn input_tiles(self) -> usize {
        self.rows.div_ceil(TILE)
    }
}
