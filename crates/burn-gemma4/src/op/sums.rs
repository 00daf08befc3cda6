//! Sums and maxima over a team, which is a group of units. The functions use plane operations if the device has them,
//! and only shared memory otherwise.

use cubecl::prelude::*;

/// A group of units that reduce a value together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Team {
    /// The number of units in the team. The number of units in a cube is a multiple of this number.
    pub units: usize,
    /// The number of units over which one plane operation sums, or 1 without plane operations.
    pub width: usize,
}

impl Team {
    /// The number of partial results that the team writes to shared memory.
    pub fn parts(self) -> usize {
        self.units / self.width
    }
}

/// Returns the sum over the unit's plane. Without plane operations, returns the unit's own value.
#[cube]
pub(super) fn part_of_sum(value: f32, #[comptime] team: Team) -> f32 {
    if comptime!(team.width > 1) {
        plane_sum(value)
    } else {
        value
    }
}

/// Returns the sum over all units of the cube. Every unit gets the sum. `partial` is shared memory with one element per
/// plane, or per unit without plane operations. Synchronizes the cube.
#[cube]
pub(super) fn cube_sum(value: f32, partial: &mut Shared<[f32]>, #[comptime] team: Team) -> f32 {
    // Wait, because some units may still read the partial results of an earlier sum.
    sync_cube();
    first_cube_sum(value, partial, team)
}

/// Returns the same sum as [`cube_sum`], but needs one barrier fewer. The kernel must not have used `partial` before.
#[cube]
pub(super) fn first_cube_sum(
    value: f32,
    partial: &mut Shared<[f32]>,
    #[comptime] team: Team,
) -> f32 {
    let part = part_of_sum(value, team);
    if UNIT_POS.is_multiple_of(comptime!(team.width as u32)) {
        partial[(UNIT_POS / comptime!(team.width as u32)) as usize] = part;
    }
    sync_cube();
    let mut sum = 0.0f32;
    #[unroll]
    for index in 0..comptime!(team.parts()) {
        sum += partial[index];
    }
    sum
}

/// Returns the maximum over all units of the cube. Every unit gets the maximum. `partial` is shared memory with one
/// element per plane, or per unit without plane operations. Synchronizes the cube.
#[cube]
pub(super) fn cube_max(value: f32, partial: &mut Shared<[f32]>, #[comptime] team: Team) -> f32 {
    // Wait, because some units may still read earlier contents of `partial`.
    sync_cube();
    let mut part = value;
    if comptime!(team.width > 1) {
        part = plane_max(value);
    }
    if UNIT_POS.is_multiple_of(comptime!(team.width as u32)) {
        partial[(UNIT_POS / comptime!(team.width as u32)) as usize] = part;
    }
    sync_cube();
    let mut largest = partial[0];
    #[unroll]
    for index in 1..comptime!(team.parts()) {
        largest = max(largest, partial[index]);
    }
    largest
}

/// Returns the sum of the squares of a vector's components, in f32.
#[cube]
pub(super) fn sum_of_squares<E: Float, N: Size>(vector: Vector<E, N>) -> f32 {
    let vector = Vector::<f32, N>::cast_from(vector);
    let squares = vector * vector;
    let mut sum = 0.0f32;
    #[unroll]
    for component in 0..squares.vector_size().comptime() {
        sum += squares.extract(component);
    }
    sum
}
