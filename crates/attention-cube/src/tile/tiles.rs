//! The numbers of a tile, and what follows from them.

use super::fragment_tiles::FragmentTiles;
use burn::tensor::DType;

/// Who multiplies, and out of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Products {
    /// Units, of operands that are read where they lie. `depth` and the numbers about stages mean nothing then.
    Direct,
    /// Units, of operands in shared memory.
    Staged,
    /// Planes, of fragments from shared memory. The numbers about the output's units and vectors mean nothing then.
    Fragments(FragmentTiles),
}

/// How a cube divides a tile among its units. `product.rs` opens with what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitTiles {
    /// Units of a cube.
    pub units: usize,
    /// Stationary rows.
    pub rows: usize,
    /// Units side by side in the first product.
    pub column_units: usize,
    /// Vectors of 4 columns of the tile that a unit owns in the first product, `column_units` vectors apart.
    pub column_vectors: usize,
    /// Columns of the operands multiplied at a time in the first product.
    pub depth: usize,
    /// Who multiplies, and out of what.
    pub products: Products,
    /// Units side by side in the second product.
    pub output_units: usize,
    /// Vectors of 4 output columns of a unit in the second product.
    pub output_vectors: usize,
    /// Of those, how many have their operand in shared memory at a time.
    pub staged_vectors: usize,
    /// Streamed rows in shared memory at a time in the second product.
    pub streamed_rows: usize,
    /// Elements of a global load: 4, or 1 where strides or sizes do not allow it.
    pub vector: usize,
}

impl UnitTiles {
    /// Whether operands are read where they lie.
    pub const fn is_direct(&self) -> bool {
        matches!(self.products, Products::Direct)
    }

    /// Whether planes multiply fragments.
    pub const fn has_fragments(&self) -> bool {
        matches!(self.products, Products::Fragments(_))
    }

    /// The dtype in which the operands of the products are in shared memory, and P is.
    pub const fn product_dtype(&self) -> DType {
        match self.products {
            Products::Fragments(tiles) => tiles.fragments.dtype,
            Products::Direct | Products::Staged => DType::F32,
        }
    }

    /// Bytes of a vector of 4 operands of the products.
    const fn vector_bytes(&self) -> usize {
        match self.product_dtype() {
            DType::F32 => 16,
            _ => 8,
        }
    }

    /// Vectors that 16 bytes have, by which rows in shared memory are further apart than they are long, so that they start in
    /// different banks.
    const fn padding(&self) -> usize {
        16 / self.vector_bytes()
    }

    /// Streamed rows of a block: the columns of S.
    pub const fn columns(&self) -> usize {
        self.column_units * self.columns_per_unit()
    }

    /// Columns of S that a unit owns.
    pub const fn columns_per_unit(&self) -> usize {
        4 * self.column_vectors
    }

    /// Elements of S that a unit owns.
    pub const fn scores_per_unit(&self) -> usize {
        self.rows_per_unit() * self.columns_per_unit()
    }

    /// Units one above the other in the first product.
    pub const fn row_units(&self) -> usize {
        self.units / self.column_units
    }

    /// Rows of S that a unit owns: `unit_row + k · row_units`.
    pub const fn rows_per_unit(&self) -> usize {
        self.rows / self.row_units()
    }

    /// Turns in which the units take the tile's rows, one row a unit.
    pub const fn row_steps(&self) -> usize {
        self.rows.div_ceil(self.units)
    }

    /// Units one above the other in the second product.
    pub const fn output_row_units(&self) -> usize {
        self.units / self.output_units
    }

    /// Rows of O that a unit owns.
    pub const fn output_rows(&self) -> usize {
        self.rows / self.output_row_units()
    }

    /// Vectors from one staged row of the first product to the next.
    pub const fn depth_pitch(&self) -> usize {
        self.depth / 4 + self.padding()
    }

    /// Vectors from one row of P to the next.
    pub const fn tile_pitch(&self) -> usize {
        self.column_units * self.column_vectors + self.padding()
    }

    /// Floats from one row's partial statistics to the next's; odd likewise.
    pub const fn partial_pitch(&self) -> usize {
        self.column_units + 1
    }

    /// Vectors of a streamed row in shared memory at a time.
    pub const fn staged_width(&self) -> usize {
        match self.products {
            Products::Fragments(tiles) => {
                tiles.staged_fragments * self.plane_columns() * tiles.fragments.n / 4
            }
            Products::Direct | Products::Staged => self.output_units * self.staged_vectors,
        }
    }

    /// Vectors from one streamed row in shared memory to the next.
    pub const fn staged_pitch(&self) -> usize {
        match self.products {
            Products::Fragments(_) => self.staged_width() + self.padding(),
            Products::Direct | Products::Staged => self.staged_width(),
        }
    }

    /// Vectors of shared memory that the first product's operands take, or those of both products where these are there at a time.
    pub(crate) const fn transposed_vectors(&self) -> usize {
        let streamed = if self.is_resident() { 2 } else { 1 };
        self.streamed_at() + streamed * self.columns() * self.depth_pitch()
    }

    /// Vectors of shared memory that the operands of either product take.
    pub const fn stage_vectors(&self) -> usize {
        if self.is_direct() {
            // None, but there is no such thing as shared memory of no size.
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

    /// Vectors of shared memory for what the backward knows of a block's queries beforehand, where units share it.
    pub const fn term_vectors(&self) -> usize {
        match self.has_fragments() {
            true => 3 * self.columns() / 4,
            false => 1,
        }
    }

    /// Vectors of shared memory that P takes.
    pub const fn tile_vectors(&self) -> usize {
        self.rows * self.tile_pitch()
    }

    /// Floats of shared memory for partial row statistics.
    pub const fn partial_floats(&self) -> usize {
        self.rows * self.partial_pitch()
    }

    /// Floats of shared memory in which the bias's gradient adds the units' sums up.
    pub const fn sum_floats(&self) -> usize {
        self.units * self.columns_per_unit()
    }

    /// Loop iterations of a unit for one block: the products that sum over `columns` columns, and `accumulated` products that
    /// sum over the block's rows. Products are counted twice if operands are copied to shared memory first.
    ///
    /// If the tile `has_masked` scores, each accumulated product marks the used columns first, one tile row an iteration.
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

    /// Bytes of shared memory of the largest kernel.
    pub const fn shared_memory(&self) -> usize {
        let rows = 4 * (self.partial_floats() + 2 * self.rows + self.columns() + self.row_groups());
        let tiles = self.left_tiles() * self.tile_vectors();
        let operands = self.vector_bytes() * (self.stage_vectors() + tiles);
        let with_tile = operands + 16 * (self.score_vectors() + self.term_vectors()) + rows;
        let with_sums = 16 * self.stage_vectors() + 4 * self.sum_floats();
        // The bias's gradient is units' work.
        if with_tile > with_sums || self.has_fragments() {
            with_tile
        } else {
            with_sums
        }
    }
}
