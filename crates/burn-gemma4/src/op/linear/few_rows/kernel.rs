//! A few rows times the transpose of a weight matrix: `output[r, o] = Σ input[r, i] · weight[o, i]`, in f32.
//!
//! Budget: `sums` floats a part of each team in shared memory, at most 8 KB; `rows · weights` sums and `unroll · weights`
//! vectors in registers, at most 32 and 8. Bound by memory: every weight is read once, by 16 bytes a unit, several of
//! them in flight; the rows are read from the cache by every team. A team's units lie along the inner dimension of a few
//! outputs, all rows of which it computes, so that one read of a weight serves them all. Of experts a team computes one item, whose
//! matrices it finds by their numbers.

use super::{
    experts::{ItemPlace, cube_of_item, item, place_of_vector, share_of_vector},
    sums::{Epilogue, FactorPlace, Outputs, ProjectPlan, finish},
};
use cubecl::prelude::*;

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project<E: Float, N: Size>(
    input: &Tensor<Vector<E, N>>,
    weight: &Tensor<Vector<E, N>>,
    through: ComptimeOption<&Tensor<Vector<E, N>>>,
    experts: ComptimeOption<&Tensor<i32>>,
    shares: ComptimeOption<&Tensor<f32>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    item_place: ItemPlace,
    vectors: u32,
    weight_stride: u32,
    through_stride: u32,
    outputs: u32,
    cap: f32,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    let lane = UNIT_POS_X;
    let team = UNIT_POS_Y;
    let item = item(item_place, plan.ranks);
    let cube = cube_of_item(item_place, plan.ranks);
    let first = (cube * comptime!(plan.teams as u32) + team) * comptime!(plan.outputs as u32);
    let first_input = (item / item_place.items_of_row) as usize * vectors as usize;

    let mut sums = Array::<f32>::new(comptime!(plan.sums()));
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        sums[index] = 0.0f32;
    }
    let mut loaded = Array::<Vector<E, N>>::new(comptime!(plan.unroll * plan.weights()));
    let mut vector = lane;
    while vector < vectors {
        #[unroll]
        for ahead in 0..plan.unroll {
            let at = vector + comptime!((ahead * plan.team.units) as u32);
            let place = place_of_vector(&experts, item, at, item_place, plan.ranks);
            let at = place.vector as usize;
            #[unroll]
            for o in 0..plan.outputs {
                // Beyond the last output, the last one again, which nobody writes.
                let row = place.row + min(first + comptime!(o as u32), outputs - 1u32);
                loaded[comptime!(ahead * plan.weights() + o)] =
                    weight[row as usize * weight_stride as usize + at];
                #[comptime]
                match &through {
                    ComptimeOption::Some(through) => {
                        let row = row + item_place.through;
                        loaded[comptime!(ahead * plan.weights() + plan.outputs + o)] =
                            through[row as usize * through_stride as usize + at];
                    }
                    ComptimeOption::None => {}
                }
            }
        }
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
        vector += comptime!((plan.unroll * plan.team.units) as u32);
    }

    let of_outputs = Outputs {
        row: item,
        first,
        outputs,
        factor_place,
        cap,
    };
    finish(sums, &factor, output, of_outputs, plan, epilogue);
}
