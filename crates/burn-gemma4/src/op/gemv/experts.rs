//! Indexing of MoE experts in GEMVs. The kernel reads the indices of the chosen experts on the device.
//!
//! The work of a GEMV is divided into work items. In the gate and up projections a work item is one (row, chosen
//! expert) pair.
//!
//! In the down projection a work item is one row, and the kernel adds up the outputs of the row's chosen experts. The
//! kernel treats the inner dimensions of these experts as one concatenated dimension. The rank of an expert is its
//! position among the experts of a work item. In the gate and up projections the rank is always 0.

use super::concat::SideOutputs;
use super::sums::ProjectPlan;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// The division of a GEMV into work items, as a kernel argument. A work item is one (row, chosen expert) pair. If the
/// kernel adds up the outputs of each row's experts, a work item is one row.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct ItemPlace {
    /// The number of cubes that compute one work item.
    pub cubes: u32,
    /// The number of work items that read the same input row. This is the number of chosen experts per row, or 1 if the
    /// kernel adds up the outputs of these experts.
    pub items_of_row: u32,
    /// The number of vectors in an expert's inner dimension.
    pub vectors: u32,
    /// The number of rows in an expert's matrix.
    pub rows: u32,
    /// The distance from a row of the gate projection to the corresponding row of the up projection, counted in rows of
    /// the expert's matrix. The expert's matrix holds both projections.
    pub through: u32,
}

/// The chosen experts of a GEMV, and the division of the GEMV's work into work items: see [`ItemPlace`].
#[derive(CubeLaunch, CubeType)]
pub(super) struct ExpertInputs {
    /// The indices of the chosen experts, `[rows, top_k]`; absent without experts.
    pub chosen: ComptimeOption<OwnedTensor<i32>>,
    /// The router's weights, `[rows, top_k]`. Present only if the kernel adds up the outputs of each row's experts.
    pub shares: ComptimeOption<OwnedTensor<f32>>,
    pub place: ItemPlace,
}

/// The position of one vector of weights within the concatenated matrices of all experts.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct VectorPlace {
    /// The row of the concatenated matrices at which the expert's matrix begins.
    pub row: u32,
    /// The index of the vector within a row of the matrix.
    pub vector: u32,
}

/// Returns the index of the work item that this cube computes: a (row, chosen expert) pair, or a row.
#[cube]
pub(super) fn item(place: ItemPlace, #[comptime] ranks: usize) -> u32 {
    if comptime!(ranks > 0) {
        CUBE_POS as u32 / place.cubes
    } else {
        0u32.runtime()
    }
}

/// Returns the index of this cube among the cubes that compute the same work item.
#[cube]
pub(super) fn cube_of_item(place: ItemPlace, #[comptime] ranks: usize) -> u32 {
    if comptime!(ranks > 0) {
        CUBE_POS as u32 % place.cubes
    } else {
        CUBE_POS as u32
    }
}

/// Returns the rank of the expert that a vector of the inner dimension belongs to. The rank is the expert's index among
/// the experts of the work item. `vector` counts vectors over the concatenated inner dimensions of all these experts.
#[cube]
fn rank_of_vector(vector: u32, place: ItemPlace, #[comptime] ranks: usize) -> u32 {
    if comptime!(ranks > 1) {
        vector / place.vectors
    } else {
        0u32.runtime()
    }
}

#[cube]
pub(super) fn place_of_vector(
    experts: &ExpertInputs,
    item: u32,
    vector: u32,
    #[comptime] ranks: usize,
) -> VectorPlace {
    let place = experts.place;
    let rank = rank_of_vector(vector, place, ranks);
    let mut row = 0u32;
    #[comptime]
    match &experts.chosen {
        ComptimeOption::Some(chosen) => {
            let choice = item * comptime!(ranks as u32) + rank;
            row = u32::cast_from(chosen[choice as usize]) * place.rows;
        }
        ComptimeOption::None => {}
    }
    VectorPlace {
        row,
        vector: vector - rank * place.vectors,
    }
}

/// Returns the router's weight of the expert that a vector belongs to.
#[cube]
pub(super) fn share_of_vector(
    shares: &Tensor<f32>,
    item: u32,
    vector: u32,
    place: ItemPlace,
    #[comptime] ranks: usize,
) -> f32 {
    let rank = rank_of_vector(vector, place, ranks);
    shares[(item * comptime!(ranks as u32) + rank) as usize]
}

/// The chosen experts of each row.
pub(super) struct OfExperts {
    /// The indices of the chosen experts, `[rows, top_k]`. Each index must be below the number of experts.
    pub chosen: CubeTensor,
    /// The router's weights, `[rows, top_k]` in f32. The kernel adds up the experts' outputs with these weights. `None`
    /// if the output has a row for each (row, chosen expert) pair.
    pub shares: Option<CubeTensor>,
    /// The number of rows in an expert's matrix.
    pub rows: usize,
}

/// The work items of a GEMV. Different cubes compute different work items. Without experts there is one work item.
#[derive(Clone, Copy)]
pub(super) struct Items {
    pub count: usize,
    /// The number of input rows that one work item reads.
    pub rows: usize,
    /// For each of the concatenated matrices, the number of outputs that one work item computes per input row.
    pub sides: SideOutputs,
    /// The number of rows in the GEMV's output.
    pub rows_out: usize,
    /// The number of experts per work item; 0 without experts. A work item multiplies by the matrices of these experts.
    pub ranks: usize,
    of_row: usize,
    rows_of_expert: usize,
    through: usize,
}

impl Items {
    /// Describes a GEMV without experts: a single work item with all `rows` input rows. `outputs` is the number of rows
    /// of each matrix.
    pub fn of_matrices(rows: usize, outputs: impl IntoIterator<Item = usize>) -> Self {
        Self {
            count: 1,
            rows,
            sides: SideOutputs::new(outputs),
            rows_out: rows,
            ranks: 0,
            of_row: 1,
            rows_of_expert: 0,
            through: 0,
        }
    }

    /// Divides a GEMV with experts into work items. If `is_gated`, the first half of an expert's matrix is the gate
    /// projection, and the second half is the up projection.
    pub fn of_experts(experts: &OfExperts, is_gated: bool) -> Self {
        let shape = experts.chosen.meta.shape();
        let [rows, top_k] = [shape[0], shape[1]];
        let (count, ranks, of_row) = match experts.shares {
            Some(_) => (rows, top_k, 1),
            None => (rows * top_k, 1, top_k),
        };
        let outputs = match is_gated {
            true => experts.rows / 2,
            false => experts.rows,
        };
        Self {
            count,
            rows: 1,
            sides: SideOutputs::new([outputs]),
            rows_out: count,
            ranks,
            of_row,
            rows_of_expert: experts.rows,
            through: experts.rows - outputs,
        }
    }

    /// The number of experts whose inner dimensions a work item concatenates; 1 without experts.
    pub fn inner(&self) -> usize {
        self.ranks.max(1)
    }

    /// The number of cubes that compute one work item.
    pub fn cubes(&self, plan: ProjectPlan) -> usize {
        self.sides.cubes(plan.cube_outputs())
    }

    /// The number of outputs that a work item computes for each of its input rows.
    pub fn outputs(&self) -> usize {
        self.sides.all()
    }

    /// Returns the work items as a kernel argument. `vectors` is the number of vectors in one expert's inner dimension.
    pub fn place(&self, plan: ProjectPlan, vectors: usize) -> ItemPlaceLaunch {
        ItemPlaceLaunch::new(
            self.cubes(plan) as u32,
            self.of_row as u32,
            vectors as u32,
            self.rows_of_expert as u32,
            self.through as u32,
        )
    }
}
