//! The division of a tile's fragments among the planes of a cube. A kernel computes the first product `S = A Bᵀ` and
//! the second product `O += P B`.
//!
//! A stationary operand is a left operand A of a first product, such as Q. The tile keeps the rows of A while the
//! kernel streams blocks of B. A streamed operand is a right operand B, such as K or V. The rows of B differ from block
//! to block. The backward pass has two first products, for S and dP.

use super::tiles::{Products, UnitTiles};
#[cfg(feature = "cube")]
use crate::math::gradient::F16_P_SCALE;
use crate::types::device::Fragments;
use burn::tensor::DType;
use std::fmt;

/// The fragments of a tile, and their division among planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentTiles {
    /// The shape and the dtype of one fragment multiplication of a plane.
    pub fragments: Fragments,
    /// The number of units per plane.
    pub plane: usize,
    /// The number of fragments of O that a plane has along a row of O.
    pub output_fragments: usize,
    /// The width of a chunk of B in the second product `O += P B`, counted in fragments per plane. Kernels copy B to
    /// shared memory in chunks of columns.
    pub staged_fragments: usize,
    /// The number of stationary operands that stay in shared memory with all columns. A stationary operand, such as Q,
    /// has the same rows for all blocks. Kernels copy all other stationary operands to shared memory again for each
    /// block.
    pub held: usize,
    /// If the streamed operands (such as K and V) are resident, the field is above 0. The field is then the number of
    /// left operands (P or dS) of the second product `O += P B` in shared memory at the same time. If the streamed
    /// operands are not resident, the field is 0, and shared memory holds one left operand at a time.
    ///
    /// Streamed operands are resident if a block's rows of both operands, with all columns, stay in shared memory
    /// during both products of the block. The two products are `S = A Bᵀ` and `O += P B`.
    pub resident: usize,
}

/// The number of neighboring rows that share one flag. The flag is set if the row maximum of any of these rows changes.
const ROW_GROUP: usize = 8;

/// Prints every field that the fragments of a kernel depend on, so that equal texts mean equal fragments.
impl fmt::Display for FragmentTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fragments,
            plane,
            output_fragments,
            staged_fragments,
            held,
            resident,
        } = self;
        let Fragments {
            m,
            n,
            k,
            dtype,
            emulation,
        } = fragments;
        if let Some(emulation) = emulation {
            write!(f, "emulated {emulation:?}, ")?;
        }
        write!(
            f,
            "{m}x{n}x{k} {dtype:?}, plane {plane}, output {output_fragments}, staged {staged_fragments}, held {held}, \
             resident {resident}"
        )
    }
}

impl UnitTiles {
    /// Returns the division of the tile into fragments.
    ///
    /// # Panics
    /// Panics if single units, not planes, multiply this tile.
    pub const fn fragment_tiles(&self) -> FragmentTiles {
        match self.products {
            Products::Fragments(tiles) => tiles,
            Products::Direct | Products::Staged => panic!("the tile must be multiplied by planes"),
        }
    }

    /// Returns rows, columns and depth of one fragment multiplication.
    pub const fn fragment_shape(&self) -> [usize; 3] {
        let Fragments { m, n, k, .. } = self.fragment_tiles().fragments;
        [m, n, k]
    }

    /// Returns the factor by which kernels multiply P before they round P. The factor keeps small probabilities from
    /// underflow.
    #[cfg(feature = "cube")]
    pub(crate) const fn p_scale(&self) -> f32 {
        match self.product_dtype() {
            DType::F16 => F16_P_SCALE,
            _ => 1.0,
        }
    }

    /// Returns the number of stationary operands that stay in shared memory. A stationary operand, such as Q, has the
    /// same rows for all blocks.
    pub const fn held(&self) -> usize {
        match self.products {
            Products::Fragments(tiles) => tiles.held,
            Products::Direct | Products::Staged => 0,
        }
    }

    /// True if a block's rows of both streamed operands (such as K and V) are in shared memory at the same time.
    pub const fn is_resident(&self) -> bool {
        match self.products {
            Products::Fragments(tiles) => tiles.resident > 0,
            Products::Direct | Products::Staged => false,
        }
    }

    /// Returns the offset, in vectors, of a streamed operand (such as K or V) in the operands' shared memory. `operand`
    /// is the operand's index. Both streamed operands must be resident: see [`is_resident`](Self::is_resident).
    pub const fn resident_at(&self, operand: usize) -> usize {
        self.streamed_at() + operand * self.columns() * self.depth_pitch()
    }

    /// True if the preceding first product (for S or dP) leaves all columns of operand B in shared memory for the
    /// second product `O += P B`. The result is false if the streamed operands are [resident](Self::is_resident).
    ///
    /// If the streamed operands are not resident, the result is true under two conditions. Both stationary operands of
    /// the backward pass stay in shared memory, and one chunk of `depth` columns is at least as wide as the output.
    pub const fn keeps_last(&self) -> bool {
        match self.products {
            Products::Fragments(tiles) => {
                let width = tiles.output_fragments * self.plane_columns() * tiles.fragments.n;
                tiles.held == 2 && tiles.resident == 0 && width <= self.depth
            }
            Products::Direct | Products::Staged => false,
        }
    }

    /// Returns the number of left operands of the second product (`O += P B`) that are in shared memory at the same time.
    pub const fn left_tiles(&self) -> usize {
        match self.products {
            Products::Fragments(tiles) if tiles.resident > 0 => tiles.resident,
            _ => 1,
        }
    }

    /// Returns the offset, in vectors, of a left operand (P or dS) of the second product `O += P B`. The offset is
    /// relative to the shared memory of all such left operands. `streamed` is the index of the right operand B among
    /// the streamed operands.
    pub const fn left_tile_at(&self, streamed: usize) -> usize {
        streamed % self.left_tiles() * self.tile_vectors()
    }

    /// Returns the number of vectors that a stationary operand (such as Q) takes in shared memory.
    pub const fn stationary_vectors(&self) -> usize {
        self.rows * self.depth_pitch()
    }

    /// Returns the offset, in vectors, at which the streamed rows B of the first product `S = A Bᵀ` start. The offset
    /// is relative to the operands' shared memory.
    pub const fn streamed_at(&self) -> usize {
        match self.held() {
            0 => self.stationary_vectors(),
            held => held * self.stationary_vectors(),
        }
    }

    /// Returns the offset, in vectors, at which the streamed rows B of the second product `O += P B` start. The offset
    /// is relative to the operands' shared memory. These rows overwrite the operands of the first product, except the
    /// stationary operands that stay in shared memory.
    pub const fn accumulated_at(&self) -> usize {
        self.held() * self.stationary_vectors()
    }

    /// Returns the number of vectors of shared memory that the streamed rows of the second product (`O += P B`) may take.
    pub const fn accumulated_vectors(&self) -> usize {
        self.transposed_vectors() - self.accumulated_at()
    }

    /// Returns the number of chunks into which kernels divide a block of B for the second product `O += P B`. A chunk
    /// has some of the rows and some of the columns. Kernels copy the chunks to shared memory one after another.
    pub const fn accumulated_parts(&self) -> usize {
        let tiles = self.fragment_tiles();
        self.columns() / self.streamed_rows * (tiles.output_fragments / tiles.staged_fragments)
    }

    /// Returns the number of planes per cube.
    pub const fn planes(&self) -> usize {
        self.units / self.fragment_tiles().plane
    }

    /// Returns the number of planes that share a column of the tile.
    pub const fn plane_rows(&self) -> usize {
        let fragments = self.rows / self.fragment_shape()[0];
        if fragments < self.planes() {
            fragments
        } else {
            self.planes()
        }
    }

    /// Returns the number of planes that share a row of the tile.
    pub const fn plane_columns(&self) -> usize {
        self.planes() / self.plane_rows()
    }

    /// Returns the number of fragments that a plane has along a column of the tile. Neighboring fragments of a plane
    /// are [`plane_rows`](Self::plane_rows) fragments apart.
    pub const fn row_fragments(&self) -> usize {
        self.rows / self.fragment_shape()[0] / self.plane_rows()
    }

    /// Returns the number of fragments, of all planes, along a row of S.
    pub const fn score_columns(&self) -> usize {
        self.columns() / self.fragment_shape()[1]
    }

    /// Returns the largest number of fragments that one plane has along a row of S.
    pub const fn score_fragments(&self) -> usize {
        self.score_columns().div_ceil(self.plane_columns())
    }

    /// Returns the number of vectors per accumulator fragment. Each vector has 4 elements.
    pub const fn fragment_vectors(&self) -> usize {
        let [m, n, _] = self.fragment_shape();
        m * n / 4
    }

    /// True if S divides evenly among the planes, and each fragment divides evenly among the units of a plane. Each
    /// unit then reads only scores of its own plane, so only that plane has to sync.
    pub const fn owns_scores(&self) -> bool {
        match self.products {
            Products::Fragments(tiles) => {
                self.score_columns().is_multiple_of(self.plane_columns())
                    && self.fragment_vectors().is_multiple_of(tiles.plane)
            }
            Products::Direct | Products::Staged => false,
        }
    }

    /// Returns the number of vectors that each unit reads from one fragment of S. Every unit must read only scores of
    /// its own plane.
    pub const fn vectors_of_fragment(&self) -> usize {
        self.fragment_vectors() / self.fragment_tiles().plane
    }

    /// Returns how many rows of S the unit's row number `k` lies below the unit's first row, which has number 0. The
    /// function chooses the rows so that each unit reads only scores that its own plane has computed.
    pub const fn own_row(&self, k: usize) -> usize {
        let [m, n, _] = self.fragment_shape();
        let fragment = k / self.vectors_of_fragment();
        let within = k % self.vectors_of_fragment();
        fragment * self.plane_rows() * m + within * self.fragment_tiles().plane / (n / 4)
    }

    /// Returns the pitch of a row of S in shared memory, in vectors. Two extra vectors place the rows of a fragment in
    /// different banks.
    pub const fn score_pitch(&self) -> usize {
        self.columns() / 4 + 2
    }

    /// Returns the number of vectors that S takes in shared memory. Later, the same memory holds one fragment of O per
    /// plane, so the number suffices for these fragments too.
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

    /// Returns the number of flags that tell whether row maxima have changed. Each flag stands for a group of
    /// neighboring rows.
    pub const fn row_groups(&self) -> usize {
        match self.has_fragments() {
            true => self.rows.div_ceil(ROW_GROUP),
            false => 1,
        }
    }

    /// Returns the number of neighboring rows in a group. A group has one flag, which tells whether the row maximum of
    /// any of its rows has changed.
    pub const fn group_rows(&self) -> usize {
        self.rows / self.row_groups()
    }

    /// Returns the number of loop iterations that the emulated fragment multiplications of a block take.
    pub(crate) const fn fragment_iterations(&self, columns: usize) -> usize {
        let tiles = self.fragment_tiles();
        let [_, _, k] = self.fragment_shape();
        let of_product = self.fragment_vectors().div_ceil(tiles.plane) * (k / 4 + 1) + 1;
        let scores = columns.div_ceil(self.depth) * (self.depth / k) * self.score_fragments();
        let output = self.columns() / k * tiles.output_fragments;
        (scores + output) * self.row_fragments() * of_product
    }
}
