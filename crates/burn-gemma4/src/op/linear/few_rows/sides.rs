//! Matrices whose outputs lie side by side: those of queries, keys and values, in one launch. Each has cubes of its own.

use super::sums::ProjectPlan;
use cubecl::prelude::*;

/// Matrices at most.
pub(super) const MOST_SIDES: usize = 3;

/// The rows of each matrix, and its cubes.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Sides {
    pub outputs: u32,
    pub second_outputs: u32,
    pub third_outputs: u32,
    pub cubes: u32,
    pub second_cubes: u32,
}

/// The matrix of a cube.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Side {
    pub number: u32,
    /// The cube among those of the matrix.
    pub cube: u32,
    /// The matrix' rows.
    pub outputs: u32,
    /// Where its outputs begin.
    pub column: u32,
    /// Outputs of all matrices.
    pub all_outputs: u32,
}

#[cube]
pub(super) fn side_of_cube(cube: u32, sides: Sides, #[comptime] plan: ProjectPlan) -> Side {
    let mut side = Side {
        number: 0u32,
        cube,
        outputs: sides.outputs,
        column: 0u32,
        all_outputs: sides.outputs,
    };
    if comptime!(plan.sides > 1) {
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

/// The rows of the matrices, of which there is one at least.
#[derive(Clone, Copy, Debug)]
pub(super) struct SideOutputs([usize; MOST_SIDES]);

impl SideOutputs {
    /// # Panics
    /// Where there are more than [`MOST_SIDES`].
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

    fn cubes_of_each(self, plan: ProjectPlan) -> [usize; MOST_SIDES] {
        self.0
            .map(|outputs| outputs.div_ceil(plan.outputs * plan.teams))
    }

    pub fn cubes(self, plan: ProjectPlan) -> usize {
        self.cubes_of_each(plan).iter().sum()
    }

    pub fn launch(self, plan: ProjectPlan) -> SidesLaunch {
        let [first, second, third] = self.0.map(|outputs| outputs as u32);
        let [cubes, second_cubes, _] = self.cubes_of_each(plan).map(|cubes| cubes as u32);
        SidesLaunch::new(first, second, third, cubes, second_cubes)
    }
}
