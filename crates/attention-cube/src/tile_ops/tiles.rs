//! The tile sizes of a kernel. The first product is `S = A Bᵀ`, the second is `O += P B`.

use super::fragment_tiles::FragmentTiles;
use burn::tensor::DType;
use std::fmt;

/// The method of tile multiplication. Either units or planes multiply, and the operands are in global or shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Products {
    /// Units multiply operands that they read from global memory. The fields for operands in shared memory, such as `depth`,
    /// are then unused.
    Direct,
    /// Units multiply operands that were copied to shared memory.
    Staged,
    /// Planes multiply fragments from shared memory. The fields `output_units`, `output_vectors` and `staged_vectors` are
    /// unused.
    Fragments(FragmentTiles),
}

/// The tile sizes of a cube, and the division of a tile among its units. The header of `product.rs` gives the costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitTiles {
    /// The number of units per cube.
    pub units: usize,
    /// The number of rows that a tile keeps. These rows are queries in the forward pass, and keys in the kernels for
    /// the gradients of keys and values.
    pub rows: usize,
    /// The number of units that share a row of S in the first product (`S = A Bᵀ`).
    pub column_units: usize,
    /// The number of vectors (4 columns of S each) that a unit computes in each of its rows of S. Neighboring vectors
    /// of a unit are `column_units` vectors apart.
    pub column_vectors: usize,
    /// The width, in columns, of a chunk of the operands of the first product (`S = A Bᵀ`). Kernels copy the operands to
    /// shared memory chunk by chunk.
    pub depth: usize,
    /// The method of tile multiplication.
    pub products: Products,
    /// The number of units that share a row of O in the second product (`O += P B`).
    pub output_units: usize,
    /// The number of vectors (4 columns of O each) that a unit computes in each of its rows of O.
    pub output_vectors: usize,
    /// The width of a chunk of B in the second product `O += P B`, counted in vectors per unit. Kernels copy B to
    /// shared memory in chunks of columns.
    pub staged_vectors: usize,
    /// The number of rows per chunk of B in the second product `O += P B`.
    pub streamed_rows: usize,
    /// The number of elements per global load: 4, or 1 if strides or sizes do not allow 4.
    pub vector: usize,
}

/// Prints every size of the tile, so that equal texts mean equal tiles.
impl fmt::Display for UnitTiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            units,
            rows,
            column_units,
            column_vectors,
            depth,
            products,
            output_units,
            output_vectors,
            staged_vectors,
            streamed_rows,
            vector,
        } = self;
        write!(
            f,
            "units {units}, rows {rows}, columns {column_units}x{column_vectors}, depth {depth}, streamed \
             {streamed_rows}, vector {vector}, "
        )?;
        match products {
            Products::Direct | Products::Staged => write!(
                f,
                "{products:?}, output {output_units}x{output_vectors}, staged {staged_vectors}"
            ),
            Products::Fragments(tiles) => write!(f, "{tiles}"),
        }
    }
}

impl UnitTiles {
    /// True if units read operands from global memory.
    pub const fn is_direct(&self) -> bool {
        matches!(self.products, Products::Direct)
    }

    /// True if planes multiply fragments.
    pub const fn has_fragments(&self) -> bool {
        matches!(self.products, Products::Fragments(_))
    }

    /// Returns the dtype of P and of the operands in shared memory.
    pub const fn product_dtype(&self) -> DType {
        match self.products {
            Products::Fragments(tiles) => tiles.fragments.dtype,
            Products::Direct | Products::Staged => DType::F32,
        }
    }

    /// Returns the size in bytes of a vector of 4 operand elements.
    const fn vector_bytes(&self) -> usize {
        match self.product_dtype() {
            DType::F32 => 16,
            _ => 8,
        }
    }

    /// Returns the padding between rows in shared memory, in vectors. Padding places neighboring rows in different banks.
    const fn padding(&self) -> usize {
        16 / self.vector_bytes()
    }

    /// Returns the number of streamed rows per block, which is the number of columns of S.
    pub const fn columns(&self) -> usize {
        self.column_units * self.columns_per_unit()
    }

    /// Returns the number of columns of S per unit.
    pub const fn columns_per_unit(&self) -> usize {
        4 * self.column_vectors
    }

    /// Returns the number of elements of S per unit.
    pub const fn scores_per_unit(&self) -> usize {
        self.rows_per_unit() * self.columns_per_unit()
    }

    /// Returns the number of units that share a column of S in the first product (`S = A Bᵀ`).
    pub const fn row_units(&self) -> usize {
        self.units / self.column_units
    }

    /// Returns the number of rows of S that each unit computes. `tile_row` in `score_layout.rs` tells which rows these
    /// are.
    pub const fn rows_per_unit(&self) -> usize {
        self.rows / self.row_units()
    }

    /// Returns the number of iterations of a loop over all rows of the tile, in which each unit takes one row per
    /// iteration.
    pub const fn row_steps(&self) -> usize {
        self.rows.div_ceil(self.units)
    }

    /// Returns the number of units that share a column of O in the second product (`O += P B`).
    pub const fn output_row_units(&self) -> usize {
        self.units / self.output_units
    }

    /// Returns the number of rows of O per unit.
    pub const fn output_rows(&self) -> usize {
        self.rows / self.output_row_units()
    }

    /// Returns the distance in shared memory between neighboring rows of an operand of the first product (`S = A Bᵀ`),
    /// in vectors.
    pub const fn depth_pitch(&self) -> usize {
        self.depth / 4 + self.padding()
    }

    /// Returns the distance between neighboring rows of P in shared memory, in vectors.
    pub const fn tile_pitch(&self) -> usize {
        self.column_units * self.column_vectors + self.padding()
    }

    /// Returns the distance in shared memory, in floats, between the partial maxima or sums of neighboring rows of S.
    /// Each of the units that share a row has one partial maximum or sum of this row. An odd distance places
    /// neighboring rows in different banks.
    pub const fn partial_pitch(&self) -> usize {
        self.column_units + 1
    }

    /// Returns the number of vectors per row of a chunk of B in shared memory. The second product `O += P B` reads
    /// these chunks.
    pub const fn staged_width(&self) -> usize {
        match self.products {
            Products::Fragments(tiles) => {
                tiles.staged_fragments * self.plane_columns() * tiles.fragments.n / 4
            }
            Products::Direct | Products::Staged => self.output_units * self.staged_vectors,
        }
    }

    /// Returns the distance in shared memory between neighboring rows in a chunk of B, in vectors. The second product
    /// `O += P B` reads these chunks.
    pub const fn staged_pitch(&self) -> usize {
        match self.products {
            Products::Fragments(_) => self.staged_width() + self.padding(),
            Products::Direct | Products::Staged => self.staged_width(),
        }
    }

    /// Returns the number of vectors that the operands of the first product (`S = A Bᵀ`) take in shared memory. If both
    /// streamed operands stay in shared memory (resident), the number includes both.
    pub(crate) const fn transposed_vectors(&self) -> usize {
        let streamed = if self.is_resident() { 2 } else { 1 };
        self.streamed_at() + streamed * self.columns() * self.depth_pitch()
    }

    /// Returns the number of vectors that the operands of both products take in shared memory.
    pub const fn stage_vectors(&self) -> usize {
        if self.is_direct() {
            // A kernel that reads operands from global memory needs no shared memory for them, but CubeCL does not allow
            // shared memory of size 0.
            return 1;
        }
        if self.is_resident() {
            return self.transposed_vectors();
        }
        let streamed = self.accumulated_at() + self.streamed_rows * self.staged_pitch();
        if self.transposed_vectors() > streamed {
            self.transposed_vectors()
        } else {
            streamed
        }
    }

    /// Returns the number of vectors that LSE and delta of a block's queries take in shared memory. If single units
    /// multiply, and not planes, kernels do not copy LSE and delta to shared memory. The result is then 1, the smallest
    /// size that CubeCL allows.
    pub const fn term_vectors(&self) -> usize {
        match self.has_fragments() {
            true => 3 * self.columns() / 4,
            false => 1,
        }
    }

    /// Returns the number of vectors that P takes in shared memory.
    pub const fn tile_vectors(&self) -> usize {
        self.rows * self.tile_pitch()
    }

    /// Returns the number of floats that the rows' partial maxima or sums take in shared memory.
    pub const fn partial_floats(&self) -> usize {
        self.rows * self.partial_pitch()
    }

    /// Returns the number of floats of shared memory that the kernel for the bias gradient needs for the units' column
    /// sums.
    pub const fn sum_floats(&self) -> usize {
        self.units * self.columns_per_unit()
    }

    /// Returns an upper bound of the loop iterations that a unit runs for one block. A first product, such as S = Q Kᵀ,
    /// sums over columns. `columns` is the total number of these columns over all first products. A second product,
    /// such as O += P V, sums over the block's rows. `accumulated` is the number of second products.
    ///
    /// If `has_masked` is true, each second product has one more loop, which marks the columns of P with a nonzero
    /// element.
    pub(crate) fn block_iterations(
        &self,
        columns: usize,
        accumulated: usize,
        has_masked: bool,
    ) -> usize {
        let products = columns.div_ceil(4) + self.columns() + 8;
        let products = match self.products {
            Products::Direct => products,
            Products::Staged => 2 * products,
            Products::Fragments(_) => self.fragment_iterations(columns) + 2 * products,
        };
        let marks = match has_masked {
            true => accumulated * self.rows * self.columns().div_ceil(self.units),
            false => 0,
        };
        products + marks
    }

    /// Returns the largest number of bytes of shared memory that any kernel with these tiles needs.
    pub const fn shared_memory(&self) -> usize {
        let rows = 4 * (self.partial_floats() + 2 * self.rows + self.columns() + self.row_groups());
        let tiles = self.left_tiles() * self.tile_vectors();
        let operands = self.vector_bytes() * (self.stage_vectors() + tiles);
        let with_tile = operands + 16 * (self.score_vectors() + self.term_vectors()) + rows;
        let with_sums = 16 * self.stage_vectors() + 4 * self.sum_floats();
        // If planes multiply fragments, reserve no shared memory for the sums of the bias gradient. The kernel for the
        // bias gradient always multiplies with single units.
        if with_tile > with_sums || self.has_fragments() {
            with_tile
        } else {
            with_sums
        }
    }
}
