//! A few rows times the transpose of a quantized weight matrix: `output[r, o] = Σ input[r, i] · weight[o, i]`, in f32.
//!
//! Budget: shared memory as in the product of whole weights; `rows · weights` sums, `vector · unroll · weights` words and a word's numbers
//! of every weight in registers, at most 32, 16 and 32. Bound by memory: every word is read once, several vectors of them in flight, and
//! its codes become numbers once for all rows. A vector of words is within one group of columns. Of one row its scale is a factor of the
//! vector's sum, where numbers are nothing but scaled codes; of several rows that would be more work than scaling the numbers.

use super::super::{
    experts::{ItemPlace, cube_of_item, item, place_of_vector, share_of_vector},
    sums::{Epilogue, FactorPlace, Outputs, ProjectPlan, finish},
};
use crate::{
    op::dequantize::kernel::{
        Group, RowParts, code, group_of_column, number, of_zero, top_of_word,
    },
    quantized::layout::Format,
};
use cubecl::prelude::*;

/// `words` and `through` twice: as words, and as vectors of codes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_words<E: Float, N: Size, M: Size>(
    input: &Tensor<Vector<E, N>>,
    words: &Tensor<u32>,
    codes: &Tensor<Vector<u32, M>>,
    through: ComptimeOption<&Tensor<u32>>,
    through_codes: ComptimeOption<&Tensor<Vector<u32, M>>>,
    experts: ComptimeOption<&Tensor<i32>>,
    shares: ComptimeOption<&Tensor<f32>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    item_place: ItemPlace,
    parts: RowParts,
    vectors: u32,
    outputs: u32,
    cap: f32,
    #[comptime] format: Format,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[comptime] converts_f16: bool,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
    #[define(M)] words_of_vector: usize,
) {
    let lane = UNIT_POS_X;
    let team = UNIT_POS_Y;
    let item = item(item_place, plan.ranks);
    let cube = cube_of_item(item_place, plan.ranks);
    let first = (cube * comptime!(plan.teams as u32) + team) * comptime!(plan.outputs as u32);
    let weights = comptime!(plan.weights());
    let columns_of_word = comptime!(format.codes_of_word());
    let columns_of_vector = comptime!(words_of_vector * columns_of_word);
    let width = input.vector_size().comptime();
    let inputs_of_word = comptime!(columns_of_word / width);
    let inputs_of_row = vectors as usize * comptime!(columns_of_vector / width);
    let first_of_item = (item / item_place.items_of_row) as usize * inputs_of_row;

    let mut sums = Array::<f32>::new(comptime!(plan.sums()));
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        sums[index] = 0.0f32;
    }
    let scales_sums = comptime!(format.is_linear() && plan.rows == 1);
    // Of one vector.
    let mut part_sums = Array::<f32>::new(weights);
    let mut numbers = Array::<f32>::new(comptime!(weights * columns_of_word));
    let mut loaded = Array::<Vector<u32, M>>::new(comptime!(plan.unroll * weights));
    let mut vector = lane;
    while vector < vectors {
        let mut groups = Sequence::<Group>::new();
        let mut tops = Sequence::<u32>::new();
        #[unroll]
        for ahead in 0..plan.unroll {
            let at = vector + comptime!((ahead * plan.team.units) as u32);
            let of_vector = place_of_vector(&experts, item, at, item_place, plan.ranks);
            let at = of_vector.vector;
            let column = at * comptime!(columns_of_vector as u32);
            #[unroll]
            for w in 0..weights {
                // Beyond the last output, the last one again, which nobody writes.
                let output = min(first + comptime!((w % plan.outputs) as u32), outputs - 1u32);
                let mut row = of_vector.row + output;
                if comptime!(w >= plan.outputs) {
                    row += item_place.through;
                }
                let start = row as usize * parts.stride as usize;
                let place = start / words_of_vector + at as usize;
                if comptime!(w < plan.outputs) {
                    loaded[comptime!(ahead * weights + w)] = codes[place];
                    read_row(
                        words,
                        start,
                        column,
                        &parts,
                        &mut groups,
                        &mut tops,
                        words_of_vector,
                        format,
                        converts_f16,
                    );
                } else {
                    #[comptime]
                    match &through_codes {
                        ComptimeOption::Some(codes) => {
                            loaded[comptime!(ahead * weights + w)] = codes[place];
                        }
                        ComptimeOption::None => {}
                    }
                    #[comptime]
                    match through {
                        ComptimeOption::Some(words) => {
                            read_row(
                                words,
                                start,
                                column,
                                &parts,
                                &mut groups,
                                &mut tops,
                                words_of_vector,
                                format,
                                converts_f16,
                            );
                        }
                        ComptimeOption::None => {}
                    }
                }
            }
        }
        #[unroll]
        for ahead in 0..plan.unroll {
            let at = vector + comptime!((ahead * plan.team.units) as u32);
            #[unroll]
            for w in 0..weights {
                part_sums[w] = 0.0f32;
            }
            #[unroll]
            for word in 0..words_of_vector {
                #[unroll]
                for w in 0..weights {
                    let codes = loaded[comptime!(ahead * weights + w)].extract(word);
                    let top = tops.index(comptime!((ahead * weights + w) * words_of_vector + word));
                    let group = groups.index(comptime!(ahead * weights + w));
                    #[unroll]
                    for index in 0..columns_of_word {
                        let code = code(codes, *top, index, format);
                        numbers[comptime!(w * columns_of_word + index)] = if scales_sums {
                            of_zero(code, group, format)
                        } else {
                            number(code, group, format)
                        };
                    }
                }
                let first_input =
                    first_of_item + (at as usize * words_of_vector + word) * inputs_of_word;
                #[unroll]
                for r in 0..plan.rows {
                    #[unroll]
                    for part in 0..inputs_of_word {
                        let mut x = Vector::<f32, N>::cast_from(
                            input[r * inputs_of_row + first_input + part],
                        );
                        #[comptime]
                        match shares {
                            ComptimeOption::Some(shares) => {
                                let share =
                                    share_of_vector(shares, item, at, item_place, plan.ranks);
                                x *= Vector::<f32, N>::cast_from(share);
                            }
                            ComptimeOption::None => {}
                        }
                        #[unroll]
                        for w in 0..weights {
                            let mut sum = 0.0f32;
                            #[unroll]
                            for component in 0..width {
                                let index =
                                    comptime!(w * columns_of_word + part * width + component);
                                sum += x.extract(component) * numbers[index];
                            }
                            if scales_sums {
                                part_sums[w] += sum;
                            } else {
                                sums[comptime!(r * weights + w)] += sum;
                            }
                        }
                    }
                }
            }
            if scales_sums {
                #[unroll]
                for w in 0..weights {
                    let group = groups.index(comptime!(ahead * weights + w));
                    sums[w] += part_sums[w] * group.scale;
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

/// Reads what a vector of codes needs beside them.
#[cube]
fn read_row(
    words: &Tensor<u32>,
    start: usize,
    column: u32,
    parts: &RowParts,
    groups: &mut Sequence<Group>,
    tops: &mut Sequence<u32>,
    #[comptime] words_of_vector: usize,
    #[comptime] format: Format,
    #[comptime] converts_f16: bool,
) {
    let scales = start + parts.scales as usize;
    groups.push(group_of_column(words, scales, column, format, converts_f16));
    let first = column / comptime!(format.codes_of_word() as u32);
    #[unroll]
    for word in 0..words_of_vector {
        let top = start + parts.top as usize;
        tops.push(top_of_word(
            words,
            top,
            first + comptime!(word as u32),
            format,
        ));
    }
}
