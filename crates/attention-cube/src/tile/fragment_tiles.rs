//! How planes divide the fragments of a tile.

use super::tiles::{Products, UnitTiles};
#[cfg(feature = "cube")]
use crate::math::gradient::F16_P_SCALE;
use burn::tensor::DType;

/// Matrices that a plane multiplies, in a layout that is the device's own: `m × k` by `k × n`, summed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragments {
    /// Rows of the sum.
    pub m: usize,
    /// Columns of the sum.
    pub n: usize,
    /// Columns of the left operand.
    pub k: usize,
    /// Of the operands.
    pub dtype: DType,
    /// The device does not have them: they are pieces of shared memory, and products are loops.
    pub emulated: bool,
}

/// The fragments of a tile, and how planes divide them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentTiles {
    /// What a plane multiplies.
    pub fragments: Fragments,
    /// Units of a plane.
    pub plane: usize,
    /// Fragments of the output side by side that a plane has.
    pub output_fragments: usize,
    /// Of those, how many have their operand in shared memory at a time.
    pub staged_fragments: usize,
    /// Stationary operands of the first product that stay in shared memory, all columns of them; else they are copied for each block.
    pub held: usize,
    /// Left operands of the second product that are in shared memory at a time, beside all columns of both streamed operands of a block,
    /// which are copied once for both products; 0 where what is multiplied next takes the place of what was.
    pub resident: usize,
}

/// Rows whose movement one number tells.
const ROW_GROUP: usize = 8;

impl UnitTiles {
    /// The fragments.
    ///
    /// # Panics
    /// Where units multiply.
    pub const fn fragment_tiles(&self) -> FragmentTiles {
        match self.products {
            Products::Fragments(tiles) => tiles,
            Products::Direct | Products::Staged => panic!("units multiply this tile"),
        }
    }

    /// Rows, columns and depth of a product of fragments.
    pub const fn fragment_shape(&self) -> [usize; 3] {
        let Fragments { m, n, k, .. } = self.fragment_tiles().fragments;
        [m, n, k]
    }

    /// What probabilities are multiplied with before they are rounded to the operands' dtype, so that small ones do not vanish.
    #[cfg(feature = "cube")]
    pub(crate) const fn p_scale(&self) -> f32 {
        match self.product_dtype() {
            DType::F16 => F16_P_SCALE,
            _ => 1.0,
        }
    }

    /// Stationary operands that stay in shared memory.
    pub const fn held(&self) -> usize {
        match self.products {
            Products::Fragments(tiles) => tiles.held,
            Products::Direct | Products::Staged => 0,
        }
    }

    /// Whether both streamed operands of a block are in shared memory at a time.
    pub const fn is_resident(&self) -> bool {
        match self.products {
            Products::Fragments(tiles) => tiles.resident > 0,
            Products::Direct | Products::Staged => false,
        }
    }

    /// Where the rows of a streamed operand begin in shared memory, where both are there.
    pub const fn resident_at(&self, operand: usize) -> usize {
        self.streamed_at() + operand * self.columns() * self.depth_pitch()
    }

    /// Whether the streamed operand of the last first product is in shared memory in full when the second begins: that of the backward, where
    /// all stationary operands stay.
    pub const fn keeps_last(&self) -> bool {
        match self.products {
            Products::Fragments(tiles) => {
                let width = tiles.output_fragments * self.plane_columns() * tiles.fragments.n;
                tiles.held == 2 && tiles.resident == 0 && width <= self.depth
            }
            Products::Direct | Products::Staged => false,
        }
    }

    /// Left operands of the second product in shared memory at a time.
    pub const fn left_tiles(&self) -> usize {
        match self.products {
            Products::Fragments(tiles) if tiles.resident > 0 => tiles.resident,
            _ => 1,
        }
    }

    /// Where the left operand of the product with a streamed operand begins in shared memory.
    pub const fn left_tile_at(&self, streamed: usize) -> usize {
        streamed % self.left_tiles() * self.tile_vectors()
    }

    /// Vectors of shared memory from one stationary operand to the next, where they stay.
    pub const fn stationary_vectors(&self) -> usize {
        self.rows * self.depth_pitch()
    }

    /// Where streamed rows of the first product begin in shared memory.
    pub const fn streamed_at(&self) -> usize {
        match self.held() {
            0 => self.stationary_vectors(),
            held => held * self.stationary_vectors(),
        }
    }

    /// Where those of the second begin: in the place of both operands of the first, but for what stays.
    pub const fn accumulated_at(&self) -> usize {
        self.held() * self.stationary_vectors()
    }

    /// Vectors of shared memory for streamed rows of the second product.
    pub const fn accumulated_vectors(&self) -> usize {
        self.transposed_vectors() - self.accumulated_at()
    }

    /// Parts in which the second product copies a block's rows to shared memory.
    pub const fn accumulated_parts(&self) -> usize {
        let tiles = self.fragment_tiles();
        self.columns() / self.streamed_rows * (tiles.output_fragments / tiles.staged_fragments)
    }

    /// Planes of a cube.
    pub const fn planes(&self) -> usize {
        self.units / self.fragment_tiles().plane
    }

    /// Planes one above the other.
    pub const fn plane_rows(&self) -> usize {
        let fragments = self.rows / self.fragment_shape()[0];
        if fragments < self.planes() {
            fragments
        } else {
            self.planes()
        }
    }

    /// Planes side by side.
    pub const fn plane_columns(&self) -> usize {
        self.planes() / self.plane_rows()
    }

    /// Fragments one above the other that a plane has: its own row of planes, and every [`plane_rows`](Self::plane_rows)-th below.
    pub const fn row_fragments(&self) -> usize {
        self.rows / self.fragment_shape()[0] / self.plane_rows()
    }

    /// Fragments of S side by side.
    pub const fn score_columns(&self) -> usize {
        self.columns() / self.fragment_shape()[1]
    }

    /// Fragments of S side by side that a plane has, at most.
    pub const fn score_fragments(&self) -> usize {
        self.score_columns().div_ceil(self.plane_columns())
    }

    /// Vectors of 4 sums of a fragment.
    pub const fn fragment_vectors(&self) -> usize {
        let [m, n, _] = self.fragment_shape();
        m * n / 4
    }

    /// Whether planes divide S evenly, and their units its fragments: each unit then has scores that its own plane multiplied, and no
    /// other plane waits for them.
    pub const fn owns_scores(&self) -> bool {
        match self.products {
            Products::Fragments(tiles) => {
                self.score_columns().is_multiple_of(self.plane_columns())
                    && self.fragment_vectors().is_multiple_of(tiles.plane)
            }
            Products::Direct | Products::Staged => false,
        }
    }

    /// Vectors of a fragment of S that a unit has, where it has those of its own plane.
    pub const fn vectors_of_fragment(&self) -> usize {
        self.fragment_vectors() / self.fragment_tiles().plane
    }

    /// Rows from a unit's first row of S to its `k`-th, where it has those of its own plane.
    pub const fn own_row(&self, k: usize) -> usize {
        let [m, n, _] = self.fragment_shape();
        let fragment = k / self.vectors_of_fragment();
        let within = k % self.vectors_of_fragment();
        fragment * self.plane_rows() * m + within * self.fragment_tiles().plane / (n / 4)
    }

    /// Vectors from one row of S in shared memory to the next: two more than it has, so that a fragment's rows start in different banks.
    pub const fn score_pitch(&self) -> usize {
        self.columns() / 4 + 2
    }

    /// Vectors of shared memory for S, or for a fragment of each plane's output.
    pub const fn score_vectors(&self) -> usize {
        if !self.has_fragments() {
            return 0;
        }
        if self.owns_scores() {
            return self.rows * self.columns() / 4;
        }
        let scores = self.rows * self.score_pitch();
        let of_planes = self.planes() * self.fragment_vectors();
        if scores > of_planes {
            scores
        } else {
            of_planes
        }
    }

    /// Numbers that tell whether rows have outgrown their references.
    pub const fn row_groups(&self) -> usize {
        match self.has_fragments() {
            true => self.rows.div_ceil(ROW_GROUP),
            false => 1,
        }
    }

    /// Rows of a group.
    pub const fn group_rows(&self) -> usize {
        self.rows / self.row_groups()
    }

    /// Iterations of the loops of emulated products for a block.
    pub(crate) const fn fragment_iterations(&self, columns: usize) -> usize {
        let tiles = self.fragment_tiles();
        let [_, _, k] = self.fragment_shape();
        let of_product = self.fragment_vectors().div_ceil(tiles.plane) * (k / 4 + 1) + 1;
        let scores = columns.div_ceil(self.depth) * (self.depth / k) * self.score_fragments();
        let output = self.columns() / k * tiles.output_fragments;
        (scores + output) * self.row_fragments() * of_product
    }
}
