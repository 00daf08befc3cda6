//! What products with experts' matrices have beside those with one matrix: whose they are is read on the device.
//!
//! A product of experts is of items. Where each expert's outputs stay apart, an item is one choice of one row; where they are added up, it is
//! a row, in whose inner dimension those of its experts lie one after the other.

use super::{sides::SideOutputs, sums::ProjectPlan};
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

/// Where the items of a product are.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct ItemPlace {
    /// Cubes of an item.
    pub cubes: u32,
    /// Items that read the same row of the input.
    pub items_of_row: u32,
    /// Vectors of an expert's inner dimension.
    pub vectors: u32,
    /// Rows of an expert's matrix.
    pub rows: u32,
    /// From a row to the one whose gate it opens.
    pub through: u32,
}

/// What a vector of an item is multiplied by.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct VectorPlace {
    /// The first row of the matrix.
    pub row: u32,
    /// The vector of its rows.
    pub vector: u32,
}

/// The item of this cube.
#[cube]
pub(super) fn item(place: ItemPlace, #[comptime] ranks: usize) -> u32 {
    if comptime!(ranks > 0) {
        CUBE_POS as u32 / place.cubes
    } else {
        0u32.runtime()
    }
}

/// Which of its item's cubes this is.
#[cube]
pub(super) fn cube_of_item(place: ItemPlace, #[comptime] ranks: usize) -> u32 {
    if comptime!(ranks > 0) {
        CUBE_POS as u32 % place.cubes
    } else {
        CUBE_POS as u32
    }
}

/// Which of its item's experts a vector is of.
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
    experts: &ComptimeOption<&Tensor<i32>>,
    item: u32,
    vector: u32,
    place: ItemPlace,
    #[comptime] ranks: usize,
) -> VectorPlace {
    let rank = rank_of_vector(vector, place, ranks);
    let mut row = 0u32;
    #[comptime]
    match experts {
        ComptimeOption::Some(experts) => {
            let choice = item * comptime!(ranks as u32) + rank;
            row = u32::cast_from(experts[choice as usize]) * place.rows;
        }
        ComptimeOption::None => {}
    }
    VectorPlace {
        row,
        vector: vector - rank * place.vectors,
    }
}

/// What the expert of a vector contributes.
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

/// The experts of each row.
pub(super) struct OfExperts {
    /// `[rows, top_k]`: the numbers of matrices that are there.
    pub chosen: CubeTensor,
    /// `[rows, top_k]` in f32: what each contributes to their sum; without, they stay apart.
    pub shares: Option<CubeTensor>,
    /// Rows of an expert's matrix.
    pub rows: usize,
}

/// The items of a product.
#[derive(Clone, Copy)]
pub(super) struct Items {
    pub count: usize,
    /// Rows of the input in each.
    pub rows: usize,
    /// Outputs of each.
    pub sides: SideOutputs,
    /// Rows of the output.
    pub rows_out: usize,
    /// See [`ProjectPlan`].
    pub ranks: usize,
    of_row: usize,
    rows_of_expert: usize,
    through: usize,
}

impl Items {
    /// All rows of the input are one item with matrices of so many rows, side by side.
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

    /// Where `is_gated`, the first half of a matrix's rows opens the gates of the second.
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

    /// Experts' inner dimensions in that of an item.
    pub fn inner(&self) -> usize {
        self.ranks.max(1)
    }

    /// Cubes of an item.
    pub fn cubes(&self, plan: ProjectPlan) -> usize {
        self.sides.cubes(plan)
    }

    /// Outputs of each.
    pub fn outputs(&self) -> usize {
        self.sides.all()
    }

    /// `vectors` are those of one expert.
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
