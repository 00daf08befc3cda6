//! Sums over the units of a team, and the largest of their values, by planes where the device has their operations, else by shared memory
//! alone.

use cubecl::prelude::*;

/// Who adds up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Team {
    /// Units of the team, which divide a cube's.
    pub units: usize,
    /// Units whose values one plane operation adds; 1 without such operations.
    pub width: usize,
}

impl Team {
    /// Parts that meet in shared memory.
    pub fn parts(self) -> usize {
        self.units / self.width
    }
}

/// What the unit's plane, or the unit alone, adds to the sum.
#[cube]
pub(super) fn part_of_sum(value: f32, #[comptime] team: Team) -> f32 {
    if comptime!(team.width > 1) {
        plane_sum(value)
    } else {
        value
    }
}

/// The sum over a cube that is one team, for all of its units. `partial` has a place for each part. Syncs.
#[cube]
pub(super) fn cube_sum(value: f32, partial: &mut Shared<[f32]>, #[comptime] team: Team) -> f32 {
    // Someone may still be reading an earlier sum's parts.
    sync_cube();
    first_cube_sum(value, partial, team)
}

/// The same where nothing has been in `partial` before: one barrier less.
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

/// The largest value of a cube that is one team, for all of its units. `partial` has a place for each part. Syncs.
#[cube]
pub(super) fn cube_max(value: f32, partial: &mut Shared<[f32]>, #[comptime] team: Team) -> f32 {
    // Someone may still be reading what was there before.
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

/// The sum of a vector's squares, in f32.
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
