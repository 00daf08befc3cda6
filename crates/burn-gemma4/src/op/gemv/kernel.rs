//! GEMV of a few input rows: `output[r, o] = Σ input[r, i] · weight[o, i]`, accumulated in f32.
//!
//! Algorithm: a team is a group of units that computes a few outputs for all input rows. The units of a team divide the
//! inner dimension among themselves. With MoE experts a team computes outputs of one work item, which is a row or a
//! (row, chosen expert) pair. If the outputs of several matrices are concatenated, each cube computes outputs of only
//! one matrix.
//!
//! Budget: shared memory holds the planes' partial sums, at most 8 KB. Registers hold `rows · weights` sums, at most
//! 32. Here `rows` is the number of input rows, and `weights` is the number of weight rows of a team. Registers also
//! hold `unroll · weights` vectors of weights in flight, at most 8.
//!
//! Bound: memory bandwidth. Each unit has several 16-byte loads of weights in flight. Every team reads the input rows
//! from the cache.

use super::concat::{Side, WeightMatrices, side_of_cube};
use super::experts::{ExpertInputs, cube_of_item, item, place_of_vector, share_of_vector};
use super::sums::{
    Epilogue, EpilogueInputs, Outputs, ProjectPlan, finish, sum_in_row, vector_in_row,
};
use cube_kit::pdl::{
    launch_dependents_if, load_now, mark_owned_volatile_if_present, mark_volatile,
    wait_prior_launch,
};
use cubecl::prelude::*;

/// The distances between consecutive rows of each matrix, in vectors.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WeightStrides {
    pub weight: u32,
    pub second: u32,
    pub third: u32,
}

/// Multiplies `input` by the transposes of the matrices. If `plan.gated`, multiplies the second matrix's output by the
/// GELU of the first matrix's output. Otherwise concatenates the outputs.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_pdl<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    matrices: WeightMatrices<OwnedTensor<Vector<E, N>>>,
    strides: WeightStrides,
    experts: ExpertInputs,
    epilogue_inputs: EpilogueInputs<E>,
    output: &mut Tensor<E>,
    vectors: u32,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let computed = comptime!(plan.pdl && !plan.reads_ahead);
    wait_prior_launch(computed);
    mark_volatile(&matrices.first, computed);
    mark_owned_volatile_if_present(&matrices.second, computed);
    mark_owned_volatile_if_present(&matrices.third, computed);
    mark_owned_volatile_if_present(&experts.chosen, plan.pdl);
    let item = item(experts.place, plan.ranks);
    let side = side_of_cube(
        cube_of_item(experts.place, plan.ranks),
        matrices.rows,
        plan.sides,
    );
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let first_input = (item / experts.place.items_of_row) as usize * vectors as usize;

    let mut loaded = Array::<Vector<E, N>>::new(comptime!(plan.unroll * plan.weights()));
    let mut sums = Array::<f32>::new(comptime!(plan.sums()));
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        sums[index] = 0.0f32;
    }
    let mut vector = UNIT_POS_X;
    if comptime!(plan.reads_ahead) {
        load_if_below(
            &matrices,
            strides,
            &experts,
            &mut loaded,
            vector,
            vectors,
            first,
            item,
            side,
            plan,
        );
    }
    wait_prior_launch(plan.reads_ahead);
    mark_volatile(input, plan.pdl);
    mark_owned_volatile_if_present(&experts.shares, plan.pdl);
    mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);
    while vector < vectors {
        if comptime!(!plan.reads_ahead) {
            load(
                &matrices,
                strides,
                &experts,
                &mut loaded,
                vector,
                vectors,
                first,
                item,
                side,
                plan,
            );
        }
        let next = vector + comptime!((plan.unroll * plan.team.units) as u32);
        launch_dependents_if(next >= vectors, plan.pdl);
        #[unroll]
        for ahead in 0..plan.unroll {
            let own = vector + comptime!((ahead * plan.team.units) as u32);
            let at = vector_in_row(own, vectors, plan);
            #[unroll]
            for r in 0..plan.rows {
                let place = first_input + r * vectors as usize + at as usize;
                let mut x = Vector::<f32, N>::cast_from(input[place]);
                #[comptime]
                match &experts.shares {
                    ComptimeOption::Some(shares) => {
                        let share = share_of_vector(shares, item, at, experts.place, plan.ranks);
                        x *= Vector::<f32, N>::cast_from(share);
                    }
                    ComptimeOption::None => {}
                }
                #[unroll]
                for w in 0..comptime!(plan.weights()) {
                    let of_weight =
                        Vector::<f32, N>::cast_from(loaded[comptime!(ahead * plan.weights() + w)]);
                    let products = x * of_weight;
                    let mut sum = 0.0f32;
                    if comptime!(!plan.is_padded) {
                        sum = sums[comptime!(r * plan.weights() + w)];
                    }
                    #[unroll]
                    for component in 0..x.vector_size().comptime() {
                        sum += products.extract(component);
                    }
                    if comptime!(plan.is_padded) {
                        sums[comptime!(r * plan.weights() + w)] +=
                            sum_in_row(sum, own, vectors, plan);
                    } else {
                        sums[comptime!(r * plan.weights() + w)] = sum;
                    }
                }
            }
        }
        vector = next;
        if comptime!(plan.reads_ahead) {
            load_if_below(
                &matrices,
                strides,
                &experts,
                &mut loaded,
                vector,
                vectors,
                first,
                item,
                side,
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
    };
    finish(sums, &epilogue_inputs, output, of_outputs, plan, epilogue);
}

/// Issues the loads of the weights that a unit multiplies. Issues no load if the unit's first vector lies beyond the
/// end of the row.
#[cube]
fn load_if_below<E: Float, N: Size>(
    matrices: &WeightMatrices<OwnedTensor<Vector<E, N>>>,
    strides: WeightStrides,
    experts: &ExpertInputs,
    loaded: &mut Array<Vector<E, N>>,
    vector: u32,
    vectors: u32,
    first: u32,
    item: u32,
    side: Side,
    #[comptime] plan: ProjectPlan,
) {
    if vector < vectors {
        load(
            matrices, strides, experts, loaded, vector, vectors, first, item, side, plan,
        );
    }
}

/// Issues the loads of the weights that a unit multiplies for its team, a group of units that computes outputs
/// together.
#[cube]
fn load<E: Float, N: Size>(
    matrices: &WeightMatrices<OwnedTensor<Vector<E, N>>>,
    strides: WeightStrides,
    experts: &ExpertInputs,
    loaded: &mut Array<Vector<E, N>>,
    vector: u32,
    vectors: u32,
    first: u32,
    item: u32,
    side: Side,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for ahead in 0..plan.unroll {
        let at = vector + comptime!((ahead * plan.team.units) as u32);
        let at = vector_in_row(at, vectors, plan);
        let place = place_of_vector(experts, item, at, plan.ranks);
        let at = place.vector as usize;
        #[unroll]
        for o in 0..plan.outputs {
            // Let units without an output load the last weight row again, so that the load stays in bounds. The
            // function `finish` does not write the sums of these units.
            let row = place.row + min(first + comptime!(o as u32), side.outputs - 1u32);
            let to = comptime!(ahead * plan.weights() + o);
            if comptime!(plan.sides > 1) {
                if side.number == 0u32 {
                    let at = row as usize * strides.weight as usize + at;
                    loaded[to] = load_now(&matrices.first, at, plan.reads_ahead);
                } else if side.number == 1u32 {
                    load_if_there(
                        &matrices.second,
                        loaded,
                        row as usize * strides.second as usize + at,
                        to,
                        plan.reads_ahead,
                    );
                } else {
                    load_if_there(
                        &matrices.third,
                        loaded,
                        row as usize * strides.third as usize + at,
                        to,
                        plan.reads_ahead,
                    );
                }
            } else {
                let of_weight = row as usize * strides.weight as usize + at;
                loaded[to] = load_now(&matrices.first, of_weight, plan.reads_ahead);
                if comptime!(plan.gated) {
                    let row = (row + experts.place.through) as usize;
                    let to = comptime!(to + plan.outputs);
                    let at = row * strides.second as usize + at;
                    load_if_there(&matrices.second, loaded, at, to, plan.reads_ahead);
                }
            }
        }
    }
}

#[cube]
fn load_if_there<E: Float, N: Size>(
    weight: &ComptimeOption<OwnedTensor<Vector<E, N>>>,
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
