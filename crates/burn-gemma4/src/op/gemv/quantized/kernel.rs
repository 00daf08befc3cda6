//! GEMV with quantized weights: `output[r, o] = Σ input[r, i] · weight[o, i]`, accumulated in f32.
//!
//! Algorithm: a unit loads vectors of packed codes, and dequantizes each code once for all input rows. All codes of a
//! vector belong to one quantization group of columns.
//!
//! If there is one input row and the format is linear (see `Format::is_linear`), the kernel multiplies the inputs by
//! unscaled codes. It then multiplies the sum over each vector by the group's scale. Otherwise the kernel scales each
//! weight. For several rows, scaling the weights is cheaper than scaling the sums.
//!
//! Budget: shared memory holds the planes' partial sums, as in the float GEMV. A team, which is a group of units,
//! handles `weights` weight rows. For each weight row, a unit keeps `unroll` vectors of `vector` words in flight. For
//! `rows` input rows, registers hold `rows · weights` sums, `vector · unroll · weights` words, and the dequantized
//! weights of one word per weight row. The sums, the words and the dequantized weights take at most 32 registers each.
//!
//! Bound: memory bandwidth.

use super::super::concat::{Side, WeightMatrices, side_of_cube};
use super::super::experts::{ExpertInputs, cube_of_item, item, place_of_vector, share_of_vector};
use super::super::sums::{
    Epilogue, EpilogueInputs, Outputs, ProjectPlan, finish, sum_in_row, vector_in_row,
};
use crate::op::dequantize::kernel::{
    Group, RowParts, code, group_of_column, number, of_zero, top_of_word,
};
use crate::quant::layout::Format;
use cube_kit::pdl::{
    launch_dependents, launch_dependents_if, mark_owned_volatile_if_present, mark_volatile,
    wait_prior_launch,
};
use cubecl::prelude::*;

/// The two bindings of a quantized matrix: the same packed rows as single 32-bit words, and as vectors of words.
#[derive(CubeLaunch, CubeType)]
pub(super) struct WordMatrix<M: Size> {
    /// The packed rows as single 32-bit words, `[outputs, words]`.
    pub words: OwnedTensor<u32>,
    /// The packed rows as vectors of words. Through this binding, the kernel reads only the words that hold codes.
    /// Through `words`, the kernel reads the upper bits of codes and the group parameters.
    pub codes: OwnedTensor<Vector<u32, M>>,
}

/// Multiplies `input` by the transposes of the quantized matrices, as the float GEMV does. Each matrix is bound twice:
/// as single words, and as vectors of words with codes.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_words_pdl<E: Float, N: Size, M: Size>(
    input: &Tensor<Vector<E, N>>,
    matrices: WeightMatrices<WordMatrix<M>>,
    parts: RowParts,
    experts: ExpertInputs,
    epilogue_inputs: EpilogueInputs<E>,
    output: &mut Tensor<E>,
    vectors: u32,
    #[comptime] format: WordsFormat,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N, M)] _sizes: [usize; 2],
) {
    let computed = comptime!(plan.pdl && !plan.reads_ahead);
    wait_prior_launch(computed);
    mark_matrix_volatile(&matrices.first, computed);
    mark_matrix_volatile_if_present(&matrices.second, computed);
    mark_matrix_volatile_if_present(&matrices.third, computed);
    mark_owned_volatile_if_present(&experts.chosen, plan.pdl);
    let item = item(experts.place, plan.ranks);
    let side = side_of_cube(
        cube_of_item(experts.place, plan.ranks),
        matrices.rows,
        plan.sides,
    );
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let weights = comptime!(plan.weights());
    let columns_of_word = comptime!(format.format.codes_of_word());
    let words_of_vector = comptime!(format.words_of_vector);
    let columns_of_vector = comptime!(words_of_vector * columns_of_word);
    let width = input.vector_size().comptime();
    let inputs_of_word = comptime!(columns_of_word / width);
    let inputs_of_row = vectors as usize * comptime!(columns_of_vector / width);
    let first_of_item = (item / experts.place.items_of_row) as usize * inputs_of_row;

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
    // For each weight row, the sum over one vector of codes, before the multiplication by the scale.
    let mut part_sums = Array::<f32>::new(weights);
    let mut numbers = Array::<f32>::new(comptime!(weights * columns_of_word));
    let mut vector = UNIT_POS_X;
    if vector < vectors {
        load(
            &matrices,
            &parts,
            &experts,
            &mut loaded,
            vector,
            vectors,
            first,
            item,
            side,
            format,
            plan,
        );
    }
    // Wait for the previous launch. The compiler may delay the preceding loads until after this wait. A variant that
    // forced these loads to be issued before the wait was slower: 524 tokens/s against 549 for a small model in 4 bits.
    wait_prior_launch(plan.reads_ahead);
    mark_volatile(input, plan.pdl);
    mark_owned_volatile_if_present(&experts.shares, plan.pdl);
    mark_owned_volatile_if_present(&epilogue_inputs.factor, plan.pdl);
    while vector < vectors {
        let next = vector + comptime!((plan.unroll * plan.team.units) as u32);
        launch_dependents_if(next >= vectors, comptime!(plan.pdl && !format.ends_first()));
        #[unroll]
        for ahead in 0..plan.unroll {
            let own = vector + comptime!((ahead * plan.team.units) as u32);
            let at = vector_in_row(own, vectors, plan);
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
                        match &experts.shares {
                            ComptimeOption::Some(shares) => {
                                let share =
                                    share_of_vector(shares, item, at, experts.place, plan.ranks);
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
                                sums[comptime!(r * weights + w)] +=
                                    sum_in_row(sum, own, vectors, plan);
                            }
                        }
                    }
                }
            }
            if scales_sums {
                #[unroll]
                for w in 0..weights {
                    let sum = part_sums[w] * loaded.scales[comptime!(ahead * weights + w)];
                    sums[w] += sum_in_row(sum, own, vectors, plan);
                }
            }
        }
        vector = next;
        // Load the next vectors here, at the end of the loop body. Loads at the start of the loop body were slower: 487
        // tokens/s against 509 for a small model in 4 bits.
        if vector < vectors {
            load(
                &matrices,
                &parts,
                &experts,
                &mut loaded,
                vector,
                vectors,
                first,
                item,
                side,
                format,
                plan,
            );
        }
    }
    launch_dependents(comptime!(plan.pdl && format.ends_first()));
    let of_outputs = Outputs {
        row: item,
        first,
        outputs: side.outputs,
        column: side.column,
        all_outputs: side.all_outputs,
    };
    finish(sums, &epilogue_inputs, output, of_outputs, plan, epilogue);
}

#[cube]
fn mark_matrix_volatile<M: Size>(matrix: &WordMatrix<M>, #[comptime] pdl: bool) {
    mark_volatile(&matrix.words, pdl);
    mark_volatile(&matrix.codes, pdl);
}

#[cube]
fn mark_matrix_volatile_if_present<M: Size>(
    matrix: &ComptimeOption<WordMatrix<M>>,
    #[comptime] pdl: bool,
) {
    #[comptime]
    match matrix {
        ComptimeOption::Some(matrix) => mark_matrix_volatile(matrix, pdl),
        ComptimeOption::None => {}
    }
}

/// The encoding of the packed words of a quantized matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct WordsFormat {
    pub format: Format,
    /// The number of words in a vector of codes.
    pub words_of_vector: usize,
    /// True if the device converts subnormal f16 exactly: see [`converts_f16`](crate::op::launch::converts_f16).
    pub converts_f16: bool,
}

impl WordsFormat {
    /// True if the kernel lets the next launch start (the PDL trigger) only after the last words have been multiplied.
    /// Otherwise the trigger follows the loads of the last words.
    ///
    /// Decode speeds on an H200 with 16 words in flight, in tokens/s:
    /// - The later trigger gives 656 for E2B and 209 for 12B in Q4_0. In Q8_0 it gives 588 for E2B and 187 for 12B.
    /// - The earlier trigger gives 677 for E2B and 211 for 12B in Q4_0. In Q8_0 it gives 565 for E2B and 177 for 12B.
    fn ends_first(self) -> bool {
        self.format.bits == 8
    }
}

/// Vectors of codes, and the upper bits and group parameters that are needed to dequantize these codes.
#[derive(CubeType)]
struct Loaded<M: Size> {
    codes: Array<Vector<u32, M>>,
    /// The upper bits of the codes, one array element for each word of `codes`. In memory, a row stores the upper bits
    /// of all its codes after the lower bits of all its codes.
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

/// Issues the loads of the words that a unit multiplies for its team, a group of units that computes outputs together.
#[cube]
fn load<M: Size>(
    matrices: &WeightMatrices<WordMatrix<M>>,
    parts: &RowParts,
    experts: &ExpertInputs,
    loaded: &mut Loaded<M>,
    vector: u32,
    vectors: u32,
    first: u32,
    item: u32,
    side: Side,
    #[comptime] format: WordsFormat,
    #[comptime] plan: ProjectPlan,
) {
    let columns_of_vector =
        comptime!((format.words_of_vector * format.format.codes_of_word()) as u32);
    #[unroll]
    for ahead in 0..plan.unroll {
        let at = vector + comptime!((ahead * plan.team.units) as u32);
        let at = vector_in_row(at, vectors, plan);
        let of_vector = place_of_vector(experts, item, at, plan.ranks);
        let at = of_vector.vector;
        #[unroll]
        for o in 0..plan.outputs {
            // Let units without an output load the last weight row again, so that the load stays in bounds. `finish`
            // does not write the sums of these units.
            let row = of_vector.row + min(first + comptime!(o as u32), side.outputs - 1u32);
            let to = comptime!(ahead * plan.weights() + o);
            let place = VectorOfRow {
                start: row as usize * parts.stride as usize,
                vector: at,
                column: at * columns_of_vector,
            };
            if comptime!(plan.sides > 1) {
                if side.number == 0u32 {
                    read(&matrices.first, place, parts, loaded, to, format);
                } else if side.number == 1u32 {
                    read_if_there(&matrices.second, place, parts, loaded, to, format);
                } else {
                    read_if_there(&matrices.third, place, parts, loaded, to, format);
                }
            } else {
                read(&matrices.first, place, parts, loaded, to, format);
                if comptime!(plan.gated) {
                    let row = row + experts.place.through;
                    let place = VectorOfRow {
                        start: row as usize * parts.stride as usize,
                        vector: at,
                        column: at * columns_of_vector,
                    };
                    let to = comptime!(to + plan.outputs);
                    read_if_there(&matrices.second, place, parts, loaded, to, format);
                }
            }
        }
    }
}

/// The position of a vector of codes in a matrix.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
struct VectorOfRow {
    /// The index of the first word of the vector's row.
    start: usize,
    vector: u32,
    /// The first column of the vector.
    column: u32,
}

#[cube]
fn read_if_there<M: Size>(
    matrix: &ComptimeOption<WordMatrix<M>>,
    place: VectorOfRow,
    parts: &RowParts,
    loaded: &mut Loaded<M>,
    #[comptime] to: usize,
    #[comptime] format: WordsFormat,
) {
    #[comptime]
    match matrix {
        ComptimeOption::Some(matrix) => read(matrix, place, parts, loaded, to, format),
        ComptimeOption::None => {}
    }
}

/// Reads a vector of codes, and the upper bits and group parameters that are needed to dequantize these codes.
#[cube]
fn read<M: Size>(
    matrix: &WordMatrix<M>,
    place: VectorOfRow,
    parts: &RowParts,
    loaded: &mut Loaded<M>,
    #[comptime] to: usize,
    #[comptime] format: WordsFormat,
) {
    let words = &matrix.words;
    let codes = &matrix.codes;
    let words_of_vector = comptime!(format.words_of_vector);
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
