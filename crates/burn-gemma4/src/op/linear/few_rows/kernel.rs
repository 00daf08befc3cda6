//! A few rows times the transpose of a weight matrix: `output[r, o] = Σ input[r, i] · weight[o, i]`, in f32.
//!
//! Budget: `sums` floats a part of each team in shared memory, at most 8 KB; `rows · weights` sums and `unroll · weights`
//! vectors in registers, at most 32 and 8. Bound by memory: every weight is read once, by 16 bytes a unit, several of
//! them in flight; the rows are read from the cache by every team. A team's units lie along the inner dimension of a few
//! outputs, all rows of which it computes, so that one read of a weight serves them all. Of experts a team computes one item, whose
//! matrices it finds by their numbers. Matrices whose outputs lie side by side have cubes of their own.

use super::{
    experts::{ItemPlace, cube_of_item, item, place_of_vector, share_of_vector},
    sides::{Side, Sides, side_of_cube},
    sums::{Epilogue, FactorPlace, Outputs, ProjectPlan, finish},
};
use cube_kit::overlap::{
    await_previous, let_next_begin_if, load_now, was_written, was_written_if_there,
};
use cubecl::prelude::*;

/// The vectors from a row of each matrix to its next.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WeightStrides {
    pub weight: u32,
    pub second: u32,
    pub third: u32,
}

/// `second` is what the first opens the gates of, or `second` and `third` have outputs beside the first's.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_overlapped<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    second: ComptimeOption<&Tensor<Vector<E, N>>>,
    third: ComptimeOption<&Tensor<Vector<E, N>>>,
    experts: ComptimeOption<&Tensor<i32>>,
    shares: ComptimeOption<&Tensor<f32>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    item_place: ItemPlace,
    sides: Sides,
    strides: WeightStrides,
    vectors: u32,
    cap: f32,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let computed = comptime!(plan.overlaps && !plan.reads_ahead);
    await_previous(computed);
    was_written(weight, computed);
    was_written_if_there(second, computed);
    was_written_if_there(third, computed);
    was_written_if_there(experts, plan.overlaps);
    let item = item(item_place, plan.ranks);
    let side = side_of_cube(cube_of_item(item_place, plan.ranks), sides, plan);
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let first_input = (item / item_place.items_of_row) as usize * vectors as usize;

    let mut loaded = Array::<Vector<E, N>>::new(comptime!(plan.unroll * plan.weights()));
    let mut sums = Array::<f32>::new(comptime!(plan.sums()));
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        sums[index] = 0.0f32;
    }
    let mut vector = UNIT_POS_X;
    if comptime!(plan.reads_ahead) {
        load_if_below(
            weight,
            second,
            third,
            &experts,
            &mut loaded,
            vector,
            vectors,
            first,
            item,
            side,
            item_place,
            strides,
            plan,
        );
    }
    await_previous(plan.reads_ahead);
    was_written(input, plan.overlaps);
    was_written_if_there(shares, plan.overlaps);
    was_written_if_there(factor, plan.overlaps);
    while vector < vectors {
        if comptime!(!plan.reads_ahead) {
            load(
                weight,
                second,
                third,
                &experts,
                &mut loaded,
                vector,
                first,
                item,
                side,
                item_place,
                strides,
                plan,
            );
        }
        let next = vector + comptime!((plan.unroll * plan.team.units) as u32);
        let_next_begin_if(next >= vectors, plan.overlaps);
        #[unroll]
        for ahead in 0..plan.unroll {
            let at = vector + comptime!((ahead * plan.team.units) as u32);
            #[unroll]
            for r in 0..plan.rows {
                let place = first_input + r * vectors as usize + at as usize;
                let mut x = Vector::<f32, N>::cast_from(input[place]);
                #[comptime]
                match shares {
                    ComptimeOption::Some(shares) => {
                        let share = share_of_vector(shares, item, at, item_place, plan.ranks);
                        x *= Vector::<f32, N>::cast_from(share);
                    }
                    ComptimeOption::None => {}
                }
                #[unroll]
                for w in 0..comptime!(plan.weights()) {
                    let of_weight =
                        Vector::<f32, N>::cast_from(loaded[comptime!(ahead * plan.weights() + w)]);
                    let products = x * of_weight;
                    let mut sum = sums[comptime!(r * plan.weights() + w)];
                    #[unroll]
                    for component in 0..x.vector_size().comptime() {
                        sum += products.extract(component);
                    }
                    sums[comptime!(r * plan.weights() + w)] = sum;
                }
            }
        }
        vector = next;
        if comptime!(plan.reads_ahead) {
            load_if_below(
                weight,
                second,
                third,
                &experts,
                &mut loaded,
                vector,
                vectors,
                first,
                item,
                side,
                item_place,
                strides,
                plan,
            );
        }
    }

    let of_outputs = Outputs {
        row: item,
        first,
        outputs: side.outputs,
        column: side.column,
        all_outputs: side.all_outputs,
        factor_place,
        cap,
    };
    finish(sums, &factor, output, of_outputs, plan, epilogue);
}

/// Puts a team's weights on their way, if its row has any there.
#[cube]
fn load_if_below<E: Float, N: Size>(
    weight: &Tensor<Vector<E, N>>,
    second: ComptimeOption<&Tensor<Vector<E, N>>>,
    third: ComptimeOption<&Tensor<Vector<E, N>>>,
    experts: &ComptimeOption<&Tensor<i32>>,
    loaded: &mut Array<Vector<E, N>>,
    vector: u32,
    vectors: u32,
    first: u32,
    item: u32,
    side: Side,
    item_place: ItemPlace,
    strides: WeightStrides,
    #[comptime] plan: ProjectPlan,
) {
    if vector < vectors {
        load(
            weight, second, third, experts, loaded, vector, first, item, side, item_place, strides,
            plan,
        );
    }
}

/// Puts a team's weights on their way.
#[cube]
fn load<E: Float, N: Size>(
    weight: &Tensor<Vector<E, N>>,
    second: ComptimeOption<&Tensor<Vector<E, N>>>,
    third: ComptimeOption<&Tensor<Vector<E, N>>>,
    experts: &ComptimeOption<&Tensor<i32>>,
    loaded: &mut Array<Vector<E, N>>,
    vector: u32,
    first: u32,
    item: u32,
    side: Side,
    item_place: ItemPlace,
    strides: WeightStrides,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for ahead in 0..plan.unroll {
        let at = vector + comptime!((ahead * plan.team.units) as u32);
        let place = place_of_vector(experts, item, at, item_place, plan.ranks);
        let at = place.vector as usize;
        #[unroll]
        for o in 0..plan.outputs {
            // Beyond the last output, the last one again, which nobody writes.
            let row = place.row + min(first + comptime!(o as u32), side.outputs - 1u32);
            let to = comptime!(ahead * plan.weights() + o);
            if comptime!(plan.sides > 1) {
                if side.number == 0u32 {
                    let at = row as usize * strides.weight as usize + at;
                    loaded[to] = load_now(weight, at, plan.reads_ahead);
                } else if side.number == 1u32 {
                    load_if_there(
                        second,
                        loaded,
                        row as usize * strides.second as usize + at,
                        to,
                        plan.reads_ahead,
                    );
                } else {
                    load_if_there(
                        third,
                        loaded,
                        row as usize * strides.third as usize + at,
                        to,
                        plan.reads_ahead,
                    );
                }
            } else {
                let of_weight = row as usize * strides.weight as usize + at;
                loaded[to] = load_now(weight, of_weight, plan.reads_ahead);
                if comptime!(plan.gated) {
                    let row = (row + item_place.through) as usize;
                    let to = comptime!(to + plan.outputs);
                    let at = row * strides.second as usize + at;
                    load_if_there(second, loaded, at, to, plan.reads_ahead);
                }
            }
        }
    }
}

#[cube]
fn load_if_there<E: Float, N: Size>(
    weight: ComptimeOption<&Tensor<Vector<E, N>>>,
    loaded: &mut Array<Vector<E, N>>,
    at: usize,
    #[comptime] to: usize,
    #[comptime] now: bool,
) {
    #[comptime]
    match weight {
        ComptimeOption::Some(weight) => {
            loaded[to] = load_now(weight, at, now);
        }
        ComptimeOption::None => {}
    }
}
