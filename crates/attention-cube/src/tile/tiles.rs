//! The numbers of a tile, and what follows from them.

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
    /// The operands are read where they lie, and not copied to shared memory before. `depth` and the
    /// numbers about stages mean nothing then.
    pub direct: bool,
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

    /// Vectors from one staged row of the first product to the next; odd, so that rows start in different banks.
    pub const fn depth_pitch(&self) -> usize {
        self.depth / 4 + 1
    }

    /// Vectors from one row of P to the next; odd likewise.
    pub const fn tile_pitch(&self) -> usize {
        self.column_units * self.column_vectors + 1
    }

    /// Floats from one row's partial statistics to the next's; odd likewise.
    pub const fn partial_pitch(&self) -> usize {
        self.column_units + 1
    }

    /// Vectors of a streamed row in shared memory at a time.
    pub const fn staged_width(&self) -> usize {
        self.output_units * self.staged_vectors
    }

    /// Vectors of shared memory that the first product's operands take.
    pub(crate) const fn transposed_vectors(&self) -> usize {
        (self.rows + self.columns()) * self.depth_pitch()
    }

    /// Vectors of shared memory that the operands of either product take.
    pub const fn stage_vectors(&self) -> usize {
        if self.direct {
            // None, but there is no such thing as shared memory of no size.
            return 1;
        }
        let streamed = self.streamed_rows * self.staged_width();
        if self.transposed_vectors() > streamed {
            self.transposed_vectors()
        } else {
            streamed
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

    /// Iterations of a unit's loops for a block: its columns by fours in the products that sum over them, its rows in those that
    /// sum over these, and as much again where operands are copied to shared memory before.
    pub(crate) fn block_iterations(&self, columns: usize) -> usize {
        let products = columns.div_ceil(4) + self.columns() + 8;
        products * if self.direct { 1 } else { 2 }
    }

    /// Bytes of shared memory of the largest kernel.
    pub const fn shared_memory(&self) -> usize {
        let rows = 4 * (self.partial_floats() + 2 * self.rows + self.columns());
        let with_tile = 16 * (self.stage_vectors() + self.tile_vectors()) + rows;
        let with_sums = 16 * self.stage_vectors() + 4 * self.sum_floats();
        if with_tile > with_sums {
            with_tile
        } else {
            with_sums
        }
    }
}
