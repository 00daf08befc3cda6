//! A few rows times the transpose of a quantized weight matrix: `output[r, o] = Σ input[r, i] · weight[o, i]`, in f32.
//!
//! Budget: shared memory as in the product of whole weights; `rows · weights` sums, `vector · unroll · weights` words and a word's numbers
//! of every weight in registers, at most 32 each. Bound by memory: every word is read once, several vectors of them in flight, and
//! its codes become numbers once for all rows. A vector of words is within one group of columns. Of one row its scale is a factor of the
//! vector's sum, where numbers are nothing but scaled codes; of several rows that would be more work than scaling the numbers.

use super::super::{
    experts::{ItemPlace, cube_of_item, item, place_of_vector, share_of_vector},
    sides::{Side, Sides, side_of_cube},
    sums::{Epilogue, FactorPlace, Outputs, ProjectPlan, finish},
};
use crate::{
    op::dequantize::kernel::{
        Group, RowParts, code, group_of_column, number, of_zero, top_of_word,
    },
    quantized::layout::Format,
};
use cube_kit::overlap::{
    await_previous, let_next_begin, let_next_begin_if, was_written, was_written_if_there,
};
use cubecl::prelude::*;

/// Each matrix twice: as words, and as vectors of codes. `second` is what the first opens the gates of, or `second` and `third` have outputs
/// beside the first's.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_words_overlapped<E: Float, N: Size, M: Size>(
    input: &Tensor<Vector<E, N>>,
    words: &Tensor<u32>,
    codes: &Tensor<Vector<u32, M>>,
    second: ComptimeOption<&Tensor<u32>>,
    second_codes: ComptimeOption<&Tensor<Vector<u32, M>>>,
    third: ComptimeOption<&Tensor<u32>>,
    third_codes: ComptimeOption<&Tensor<Vector<u32, M>>>,
    experts: ComptimeOption<&Tensor<i32>>,
    shares: ComptimeOption<&Tensor<f32>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    item_place: ItemPlace,
    sides: Sides,
    parts: RowParts,
    vectors: u32,
    cap: f32,
    #[comptime] format: WordsFormat,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
    #[define(M)] words_of_vector: usize,
) {
    let computed = comptime!(plan.overlaps && !plan.reads_ahead);
    await_previous(computed);
    was_written(words, computed);
    was_written(codes, computed);
    was_written_if_there(second, computed);
    was_written_if_there(second_codes, computed);
    was_written_if_there(third, computed);
    was_written_if_there(third_codes, computed);
    was_written_if_there(experts, plan.overlaps);
    let item = item(item_place, plan.ranks);
    let side = side_of_cube(cube_of_item(item_place, plan.ranks), sides, plan);
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let weights = comptime!(plan.weights());
    let columns_of_word = comptime!(format.format.codes_of_word());
    let columns_of_vector = comptime!(words_of_vector * columns_of_word);
    let width = input.vector_size().comptime();
    let inputs_of_word = comptime!(columns_of_word / width);
    let inputs_of_row = vectors as usize * comptime!(columns_of_vector / width);
    let first_of_item = (item / item_place.items_of_row) as usize * inputs_of_row;

    let mut loaded = Loaded::<M> {
        codes: Array::new(comptime!(plan.unroll * weights)),
        tops: Array::new(comptime!(plan.unroll * weights * words_of_vector)),
        zeros: Array::new(comptime!(plan.unroll * weights)),
        scales: Array::new(comptime!(plan.unroll * weights)),
        leasts: Array::new(comptime!(plan.unroll * weights)),
    };
    let mut sums = Array::<f32>::new(comptime!(plan.sums()));
    #[unroll]
    for index in 0..comptime!(plan.sums()) {
        sums[index] = 0.0f32;
    }
    let scales_sums = comptime!(format.format.is_linear() && plan.rows == 1);
    // Of one vector.
    let mut part_sums = Array::<f32>::new(weights);
    let mut numbers = Array::<f32>::new(comptime!(weights * columns_of_word));
    let mut vector = UNIT_POS_X;
    if vector < vectors {
        load(
            words,
            codes,
            second,
            second_codes,
            third,
            third_codes,
            &experts,
            &mut loaded,
            vector,
            first,
            item,
            side,
            item_place,
            &parts,
            words_of_vector,
            format,
            plan,
        );
    }
    // What compilers move behind this may stay there: words read before it, as whole weights are, were measured, 524 tokens/s of a
    // small model in 4 bits for 549.
    await_previous(plan.reads_ahead);
    was_written(input, plan.overlaps);
    was_written_if_there(shares, plan.overlaps);
    was_written_if_there(factor, plan.overlaps);
    while vector < vectors {
        let next = vector + comptime!((plan.unroll * plan.team.units) as u32);
        let_next_begin_if(
            next >= vectors,
            comptime!(plan.overlaps && !format.ends_first()),
        );
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
                    let place = comptime!(ahead * weights + w);
                    let codes = loaded.codes[place].extract(word);
                    let top = loaded.tops[comptime!(place * words_of_vector + word)];
                    let group = loaded.group(place);
                    #[unroll]
                    for index in 0..columns_of_word {
                        let code = code(codes, top, index, format.format);
                        numbers[comptime!(w * columns_of_word + index)] = if scales_sums {
                            of_zero(code, &group, format.format)
                        } else {
                            number(code, &group, format.format)
                        };
                    }
                }
                let first_input = (at as usize * words_of_vector + word) * inputs_of_word;
                #[unroll]
                for r in 0..plan.rows {
                    #[unroll]
                    for part in 0..inputs_of_word {
                        let place = first_of_item + r * inputs_of_row + first_input + part;
                        let mut x = Vector::<f32, N>::cast_from(input[place]);
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
                    sums[w] += part_sums[w] * loaded.scales[comptime!(ahead * weights + w)];
                }
            }
        }
        vector = next;
        // Here and not where the loop begins: measured, 509 tokens/s of a small model in 4 bits for 487.
        if vector < vectors {
            load(
                words,
                codes,
                second,
                second_codes,
                third,
                third_codes,
                &experts,
                &mut loaded,
                vector,
                first,
                item,
                side,
                item_place,
                &parts,
                words_of_vector,
                format,
                plan,
            );
        }
    }
    let_next_begin(comptime!(plan.overlaps && format.ends_first()));
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

/// How words are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WordsFormat {
    pub format: Format,
    /// See [`converts_f16`](crate::op::launch::converts_f16).
    pub converts_f16: bool,
}

impl WordsFormat {
    /// Whether the next launch begins when words are there, and not when the last of them are on their way. Decoding on an H200 with 16 words in flight,
    /// tokens/s of E2B and 12B: in Q4_0 656 and 209 for 677 and 211, in Q8_0 588 and 187 for 565 and 177.
    fn ends_first(self) -> bool {
        self.format.bits == 8
    }
}

/// Vectors of codes, and what they need beside them.
#[derive(CubeType)]
struct Loaded<M: Size> {
    codes: Array<Vector<u32, M>>,
    /// Of every word.
    tops: Array<u32>,
    zeros: Array<f32>,
    scales: Array<f32>,
    leasts: Array<f32>,
}

#[cube]
impl<M: Size> Loaded<M> {
    fn group(&self, #[comptime] place: usize) -> Group {
        Group {
            zero: self.zeros[place],
            scale: self.scales[place],
            least: self.leasts[place],
        }
    }
}

/// Puts a team's words on their way.
#[cube]
fn load<M: Size>(
    words: &Tensor<u32>,
    codes: &Tensor<Vector<u32, M>>,
    second: ComptimeOption<&Tensor<u32>>,
    second_codes: ComptimeOption<&Tensor<Vector<u32, M>>>,
    third: ComptimeOption<&Tensor<u32>>,
    third_codes: ComptimeOption<&Tensor<Vector<u32, M>>>,
    experts: &ComptimeOption<&Tensor<i32>>,
    loaded: &mut Loaded<M>,
    vector: u32,
    first: u32,
    item: u32,
    side: Side,
    item_place: ItemPlace,
    parts: &RowParts,
    #[comptime] words_of_vector: usize,
    #[comptime] format: WordsFormat,
    #[comptime] plan: ProjectPlan,
) {
    let columns_of_vector = comptime!((words_of_vector * format.format.codes_of_word()) as u32);
    #[unroll]
    for ahead in 0..plan.unroll {
        let at = vector + comptime!((ahead * plan.team.units) as u32);
        let of_vector = place_of_vector(experts, item, at, item_place, plan.ranks);
        let at = of_vector.vector;
        #[unroll]
        for o in 0..plan.outputs {
            // Beyond the last output, the last one again, which nobody writes.
            let row = of_vector.row + min(first + comptime!(o as u32), side.outputs - 1u32);
            let to = comptime!(ahead * plan.weights() + o);
            let place = VectorOfRow {
                start: row as usize * parts.stride as usize,
                vector: at,
                column: at * columns_of_vector,
            };
            if comptime!(plan.sides > 1) {
                if side.number == 0u32 {
                    read(
                        words,
                        codes,
                        place,
                        parts,
                        loaded,
                        to,
                        words_of_vector,
                        format,
                    );
                } else if side.number == 1u32 {
                    read_if_there(
                        second,
                        second_codes,
                        place,
                        parts,
                        loaded,
                        to,
                        words_of_vector,
                        format,
                    );
                } else {
                    read_if_there(
                        third,
                        third_codes,
                        place,
                        parts,
                        loaded,
                        to,
                        words_of_vector,
                        format,
                    );
                }
            } else {
                read(
                    words,
                    codes,
                    place,
                    parts,
                    loaded,
                    to,
                    words_of_vector,
                    format,
                );
                if comptime!(plan.gated) {
                    let row = row + item_place.through;
                    let place = VectorOfRow {
                        start: row as usize * parts.stride as usize,
                        vector: at,
                        column: at * columns_of_vector,
                    };
                    let to = comptime!(to + plan.outputs);
                    read_if_there(
                        second,
                        second_codes,
                        place,
                        parts,
                        loaded,
                        to,
                        words_of_vector,
                        format,
                    );
                }
            }
        }
    }
}

/// A vector of codes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct VectorOfRow {
    /// Where its row begins, in words.
    start: usize,
    vector: u32,
    /// Its first.
    column: u32,
}

#[cube]
fn read_if_there<M: Size>(
    words: ComptimeOption<&Tensor<u32>>,
    codes: ComptimeOption<&Tensor<Vector<u32, M>>>,
    place: VectorOfRow,
    parts: &RowParts,
    loaded: &mut Loaded<M>,
    #[comptime] to: usize,
    #[comptime] words_of_vector: usize,
    #[comptime] format: WordsFormat,
) {
    #[comptime]
    match words {
        ComptimeOption::Some(words) =>
        {
            #[comptime]
            match codes {
                ComptimeOption::Some(codes) => read(
                    words,
                    codes,
                    place,
                    parts,
                    loaded,
                    to,
                    words_of_vector,
                    format,
                ),
                ComptimeOption::None => {}
            }
        }
        ComptimeOption::None => {}
    }
}

/// Reads a vector of codes, and what it needs beside them.
#[cube]
fn read<M: Size>(
    words: &Tensor<u32>,
    codes: &Tensor<Vector<u32, M>>,
    place: VectorOfRow,
    parts: &RowParts,
    loaded: &mut Loaded<M>,
    #[comptime] to: usize,
    #[comptime] words_of_vector: usize,
    #[comptime] format: WordsFormat,
) {
    loaded.codes[to] = codes[place.start / words_of_vector + place.vector as usize];
    let group = group_of_column(
        words,
        place.start + parts.scales as usize,
        place.column,
        format.format,
        format.converts_f16,
    );
    loaded.zeros[to] = group.zero;
    loaded.scales[to] = group.scale;
    loaded.leasts[to] = group.least;
    let first = place.column / comptime!(format.format.codes_of_word() as u32);
    #[unroll]
    for word in 0..words_of_vector {
        loaded.tops[comptime!(to * words_of_vector + word)] = top_of_word(
            words,
            place.start + parts.top as usize,
            first + comptime!(word as u32),
            format.format,
        );
    }
}
