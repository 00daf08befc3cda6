//! Concatenated matrices, such as the query, key and value projections. A single GEMV launch multiplies the input by
//! all concatenated matrices. Each matrix has its own cubes.

use burn_cubecl::{cubecl, tensor::CubeTensor};
use cubecl::prelude::*;

/// The largest number of concatenated matrices.
pub(super) const MOST_SIDES: usize = 3;

/// The number of rows of each matrix, and the number of cubes for each of the first two matrices. The remaining cubes
/// compute the outputs of the third matrix.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct ConcatRows {
    pub outputs: u32,
    pub second_outputs: u32,
    pub third_outputs: u32,
    pub cubes: u32,
    pub second_cubes: u32,
}

/// The weight matrices of a GEMV. `W` is the kernel argument of one matrix: a tensor, or several bindings of the same
/// tensor.
#[derive(CubeLaunch, CubeType)]
pub(super) struct WeightMatrices<W: CubeType> {
    /// The first matrix, `[outputs, columns in]`. In a gated GEMV this matrix is the gate projection.
    pub first: W,
    /// The second matrix, `[second_outputs, columns in]`. In a gated GEMV this matrix's outputs are multiplied by the
    /// GELU of the gate's outputs.
    pub second: ComptimeOption<W>,
    /// The third matrix, `[third_outputs, columns in]`.
    pub third: ComptimeOption<W>,
    pub rows: ConcatRows,
}

/// Returns the kernel argument [`WeightMatrices`]. The closure `argument` converts one matrix to its kernel argument.
pub(super) fn weight_matrices<W: LaunchArg>(
    first: CubeTensor,
    others: [Option<CubeTensor>; MOST_SIDES - 1],
    rows: ConcatRowsLaunch,
    argument: impl Fn(CubeTensor) -> W::RuntimeArg,
) -> WeightMatricesLaunch<W> {
    let [second, third] = others.map(|matrix| matrix.map(&argument));
    WeightMatricesLaunch::new(argument(first), second.into(), third.into(), rows)
}

/// The matrix that a cube multiplies by, and the cube's index among all cubes of that matrix.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Side {
    pub number: u32,
    /// The index of the cube among the cubes of its matrix.
    pub cube: u32,
    /// The number of rows of the matrix, which is the number of its outputs.
    pub outputs: u32,
    /// The output column at which the outputs of the matrix begin.
    pub column: u32,
    /// The total number of output columns of all matrices.
    pub all_outputs: u32,
}

/// Returns the matrix that cube `cube` multiplies by. `count` is the number of matrices.
#[cube]
pub(super) fn side_of_cube(cube: u32, sides: ConcatRows, #[comptime] count: usize) -> Side {
    let mut side = Side {
        number: 0u32,
        cube,
        outputs: sides.outputs,
        column: 0u32,
        all_outputs: sides.outputs,
    };
    if comptime!(count > 1) {
        side.all_outputs = sides.outputs + sides.second_outputs + sides.third_outputs;
        let before_third = sides.cubes + sides.second_cubes;
        if cube >= before_third {
            side.number = 2u32;
            side.cube = cube - before_third;
            side.outputs = sides.third_outputs;
            side.column = sides.outputs + sides.second_outputs;
        } else if cube >= sides.cubes {
            side.number = 1u32;
            side.cube = cube - sides.cubes;
            side.outputs = sides.second_outputs;
            side.column = sides.outputs;
        }
    }
    side
}

/// The number of rows of each matrix; unused matrices have 0 rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct SideOutputs([usize; MOST_SIDES]);

impl SideOutputs {
    /// Creates the row counts of one to three matrices.
    pub fn new(outputs: impl IntoIterator<Item = usize>) -> Self {
        let mut all = [0; MOST_SIDES];
        for (index, outputs) in outputs.into_iter().enumerate() {
            all[index] = outputs;
        }
        Self(all)
    }

    pub fn all(self) -> usize {
        self.0.iter().sum()
    }

    /// Returns the number of cubes for each matrix. Each cube computes `outputs` outputs of its matrix.
    fn cubes_of_each(self, outputs: usize) -> [usize; MOST_SIDES] {
        self.0.map(|rows| rows.div_ceil(outputs))
    }

    /// Returns the total number of cubes for all matrices. Each cube computes `outputs` outputs of its matrix.
    pub fn cubes(self, outputs: usize) -> usize {
        self.cubes_of_each(outputs).iter().sum()
    }

    /// Returns the kernel argument [`ConcatRows`]. Each cube computes `outputs` outputs of its matrix.
    pub fn launch(self, outputs: usize) -> ConcatRowsLaunch {
        let [first, second, third] = self.0.map(|rows| rows as u32);
        let [cubes, second_cubes, _] = self.cubes_of_each(outputs).map(|cubes| cubes as u32);
        ConcatRowsLaunch::new(first, second, third, cubes, second_cubes)
    }

    /// True if the number of rows of each matrix is a multiple of `rows`.
    #[cfg(feature = "cuda")]
    pub fn are_multiples_of(self, rows: usize) -> bool {
        self.0.iter().all(|all| all.is_multiple_of(rows))
    }
}
