//! A few rows times the transpose of a quantized weight matrix on NVIDIA's matrix units: `output[r, o] = Σ scale · Σ input[r, i] · code[o, i]`, in f32.
//!
//! Budget: shared memory as in the product of whole weights; in registers the codes of 4 steps, at most 32 words, a word of scales for each 8 weight rows,
//! and the next, the input's 8 words of a step, the codes' numbers of a group, and 2 sums for each 8 weight rows. Bound by memory as far as unpacking lets it: every
//! word is read once, and its codes become halves once for all rows, exactly, by pairs.
//!
//! A step is 64 columns, two groups. A lane reads 16 codes of a row, half of a group, which lie together; lanes of the first group give those of the second
//! half of theirs for those that the others have of the first half of the second: then all four have a quarter of each. A product sums over the columns of one group, and its sums
//! are multiplied by the group's scale in f32. A word of scales is of both groups; a lane reads that of one of 4 steps, and lanes ask each other for them.

use super::{
    super::{
        sides::{Side, Sides, side_of_cube},
        sums::{Epilogue, FactorPlace, Outputs, ProjectPlan, finish_parts},
    },
    parts::{Lane, lane, leave_parts, weight_row},
};
use burn::tensor::{bf16, f16};
use cube_kit::{
    ampere::{
        copy::half_address,
        few_rows::{add_halves, add_pairs, read_piece_if, read_word, stream},
    },
    hopper::{
        Half,
        ptx::{unpack, word_address},
    },
    overlap::{await_previous, let_next_begin, was_written_if_there},
};
use cubecl::prelude::*;

/// Columns of a group.
pub(super) const GROUP: usize = 32;
/// Columns of a step, whose scales are a word.
pub(super) const STEP: usize = 2 * GROUP;
/// Steps of a block: each of a row's four lanes has the scales of one.
pub(super) const BLOCK: usize = 4;
/// Codes of a lane's in a step.
const CODES: usize = STEP / 4;
/// Bytes of a step of the input.
const INPUT_BYTES: usize = 2 * STEP;

/// How the rows of words are.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct WordRows {
    /// Words from a row to the next.
    pub stride: u32,
    /// Where scales begin in a row.
    pub scales: u32,
    /// Columns of a row.
    pub columns: u32,
}

/// What codes are, and what multiplies them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Codes {
    /// Bits of a code, 4 or 8, of which half of the codes are negative.
    pub bits: usize,
    pub half: Half,
}

impl Codes {
    /// Words of a lane's codes of a step.
    pub(super) const fn words(self) -> usize {
        CODES * self.bits / 32
    }

    const fn step_bytes(self) -> usize {
        STEP * self.bits / 8
    }

    /// A number whose lowest bits are a code's, if they are put into both halves of it.
    fn base(self) -> u32 {
        self.pair(self.base_number())
    }

    fn base_number(self) -> f32 {
        match self.half {
            Half::F16 => 1024.0,
            Half::Bf16 => 128.0,
        }
    }

    /// What the sum with makes the code's number of that.
    fn shift(self) -> u32 {
        self.pair(-(self.base_number() + (1 << (self.bits - 1)) as f32))
    }

    /// Bits of a code that fit below the base.
    fn mask(self) -> u32 {
        match (self.bits, self.half) {
            (4, _) => 0x000f_000f,
            (_, Half::F16) => 0x00ff_00ff,
            (_, Half::Bf16) => 0x007f_007f,
        }
    }

    /// Whether a code's top bit does not fit below the base.
    fn has_top(self) -> bool {
        self.bits == 8 && self.half == Half::Bf16
    }

    fn pair(self, number: f32) -> u32 {
        let bits = match self.half {
            Half::F16 => f16::from_f32(number).to_bits(),
            Half::Bf16 => bf16::from_f32(number).to_bits(),
        };
        u32::from(bits) << 16 | u32::from(bits)
    }
}

/// `second` is what the first opens the gates of, or `second` and `third` have outputs beside the first's.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn project_words_by_matrix_units_overlapped<E: Float, N: Size>(
    input: &Tensor<E>,
    words: &Tensor<u32>,
    second: ComptimeOption<&Tensor<u32>>,
    third: ComptimeOption<&Tensor<u32>>,
    factor: ComptimeOption<&Tensor<E>>,
    output: &mut Tensor<E>,
    factor_place: FactorPlace,
    sides: Sides,
    word_rows: WordRows,
    cap: f32,
    #[comptime] codes: Codes,
    #[comptime] plan: ProjectPlan,
    #[comptime] epilogue: Epilogue,
    #[define(E)] _element: ElemType,
    #[define(N)] _words_of_lane: usize,
) {
    await_previous(comptime!(plan.overlaps && !plan.reads_ahead));
    let side = side_of_cube(CUBE_POS as u32, sides, plan);
    let team = side.cube * comptime!(plan.teams as u32) + UNIT_POS_Y;
    let first = team * comptime!(plan.outputs as u32);
    let lane = lane();

    let fragments = comptime!(plan.fragments());
    let mut code_addresses = Array::<u64>::new(fragments);
    let mut scale_addresses = Array::<u64>::new(fragments);
    let mut sums = Array::<f32>::new(comptime!(2 * fragments));
    let first_code =
        (lane.warp * comptime!(4 * BLOCK as u32) + lane.column) * comptime!(codes.words() as u32);
    let first_scale = word_rows.scales + lane.warp * comptime!(BLOCK as u32) + lane.column;
    #[unroll]
    for fragment in 0..fragments {
        let row = weight_row(first, lane.row, side.outputs, fragment, plan);
        let start = u64::cast_from(row) * u64::cast_from(word_rows.stride);
        let code = start + u64::cast_from(first_code);
        let scale = start + u64::cast_from(first_scale);
        code_addresses[fragment] =
            address_of_side(words, second, third, code, side, fragment, plan);
        scale_addresses[fragment] =
            address_of_side(words, second, third, scale, side, fragment, plan);
        sums[comptime!(2 * fragment)] = 0.0f32;
        sums[comptime!(2 * fragment + 1)] = 0.0f32;
    }
    let mut read = Array::<Vector<u32, N>>::new(comptime!(BLOCK * fragments));
    let mut scales = Array::<u32>::new(fragments);
    let mut next_scales = Array::<u32>::new(fragments);
    #[unroll]
    for fragment in 0..fragments {
        scales[fragment] = read_word(scale_addresses[fragment], 0usize);
    }
    #[unroll]
    for step in 0..BLOCK {
        read_codes::<N>(&mut read, &code_addresses, step, codes, plan);
    }
    await_previous(plan.reads_ahead);
    was_written_if_there(factor, plan.overlaps);

    let is_there = select(lane.row < comptime!(plan.rows as u32), 1u32, 0u32);
    let input_row = min(lane.row, comptime!(plan.rows as u32 - 1));
    // Whose quarter of a group a lane has after the exchange.
    let quarter = lane.column % 2u32 * 2u32 + lane.column / 2u32;
    let column =
        lane.warp * comptime!((BLOCK * STEP) as u32) + quarter * comptime!(GROUP as u32 / 4);
    let mut rows_address = half_address::<E>(
        input,
        u64::cast_from(input_row) * u64::cast_from(word_rows.columns) + u64::cast_from(column),
    );
    let parts = comptime!(plan.team.parts());
    let blocks = word_rows.columns / comptime!((BLOCK * STEP * parts) as u32);
    let mut done = 1u32;
    while done < blocks {
        #[unroll]
        for fragment in 0..fragments {
            let code_bytes = comptime!((BLOCK * codes.step_bytes() * parts) as u64);
            code_addresses[fragment] += code_bytes;
            let scale_bytes = comptime!((4 * BLOCK * parts) as u64);
            scale_addresses[fragment] += scale_bytes;
            next_scales[fragment] = read_word(scale_addresses[fragment], 0usize);
        }
        #[unroll]
        for step in 0..BLOCK {
            multiply::<N>(
                &mut sums,
                &read,
                &scales,
                rows_address,
                is_there,
                lane,
                step,
                codes,
                plan,
            );
            read_codes::<N>(&mut read, &code_addresses, step, codes, plan);
        }
        #[unroll]
        for fragment in 0..fragments {
            scales[fragment] = next_scales[fragment];
        }
        rows_address += comptime!((BLOCK * INPUT_BYTES * parts) as u64);
        done += 1u32;
    }
    let_next_begin(plan.overlaps);
    #[unroll]
    for step in 0..BLOCK {
        multiply::<N>(
            &mut sums,
            &read,
            &scales,
            rows_address,
            is_there,
            lane,
            step,
            codes,
            plan,
        );
    }

    let mut partial = Shared::<[f32]>::new_slice(comptime!(plan.partials()));
    #[unroll]
    for fragment in 0..fragments {
        let sum = sums[comptime!(2 * fragment)];
        let next = sums[comptime!(2 * fragment + 1)];
        leave_parts(&mut partial, sum, next, lane, fragment, plan);
    }
    let of_outputs = Outputs {
        row: 0u32,
        first,
        outputs: side.outputs,
        column: side.column,
        all_outputs: side.all_outputs,
        factor_place,
        cap,
    };
    finish_parts(&partial, &factor, output, of_outputs, plan, epilogue);
}

/// Where the word of so large an index is in a fragment's matrix.
#[cube]
fn address_of_side(
    words: &Tensor<u32>,
    second: ComptimeOption<&Tensor<u32>>,
    third: ComptimeOption<&Tensor<u32>>,
    index: u64,
    side: Side,
    #[comptime] fragment: usize,
    #[comptime] plan: ProjectPlan,
) -> u64 {
    if comptime!(fragment >= plan.fragments_of_matrix()) {
        address_if_there(second, index)
    } else {
        let mut found = address(words, index);
        if comptime!(plan.sides > 1) {
            if side.number == 1u32 {
                found = address_if_there(second, index);
            } else if side.number == 2u32 {
                found = address_if_there(third, index);
            }
        }
        found
    }
}

#[cube]
fn address(words: &Tensor<u32>, index: u64) -> u64 {
    // SAFETY: only the address is taken.
    word_address::<u32>(unsafe { words.as_slice().as_ptr_unchecked() }, index)
}

#[cube]
fn address_if_there(words: ComptimeOption<&Tensor<u32>>, index: u64) -> u64 {
    let mut found = 0u64;
    #[comptime]
    match words {
        ComptimeOption::Some(words) => {
            found = address(words, index);
        }
        ComptimeOption::None => {}
    }
    found
}

/// Puts the codes of a step on their way.
#[cube]
fn read_codes<N: Size>(
    read: &mut Array<Vector<u32, N>>,
    addresses: &Array<u64>,
    #[comptime] step: usize,
    #[comptime] codes: Codes,
    #[comptime] plan: ProjectPlan,
) {
    #[unroll]
    for fragment in 0..comptime!(plan.fragments()) {
        let offset = comptime!(step * codes.step_bytes());
        let place = comptime!(step * plan.fragments() + fragment);
        read[place] = stream::<N>(addresses[fragment], offset, comptime!(codes.words()));
    }
}

/// Adds a step's products to the sums.
#[cube]
fn multiply<N: Size>(
    sums: &mut Array<f32>,
    read: &Array<Vector<u32, N>>,
    scales: &Array<u32>,
    rows_address: u64,
    is_there: u32,
    lane: Lane,
    #[comptime] step: usize,
    #[comptime] codes: Codes,
    #[comptime] plan: ProjectPlan,
) {
    let offset = comptime!(step * INPUT_BYTES);
    let row = read_piece_if(rows_address, is_there, offset);
    let next_row = read_piece_if(rows_address, is_there, comptime!(offset + INPUT_BYTES / 2));
    let mut pairs = Array::<u32>::new(4usize);
    let mut next_pairs = Array::<u32>::new(4usize);
    as_codes_lie(&mut pairs, row, codes);
    as_codes_lie(&mut next_pairs, next_row, codes);
    let half_words = comptime!(codes.words() / 2);
    let gives_first = lane.column >= 2u32;
    #[unroll]
    for fragment in 0..comptime!(plan.fragments()) {
        let own = read[comptime!(step * plan.fragments() + fragment)];
        let mut of_group = Array::<u32>::new(half_words);
        let mut of_next = Array::<u32>::new(half_words);
        #[unroll]
        for word in 0..half_words {
            let one = own.extract(word);
            let other = own.extract(comptime!(half_words + word));
            let received = plane_shuffle_xor(select(gives_first, one, other), 2u32);
            of_group[word] = select(gives_first, received, one);
            of_next[word] = select(gives_first, other, received);
        }
        let group = group_sums(&of_group, &pairs, codes);
        let next = group_sums(&of_next, &next_pairs, codes);
        #[unroll]
        for output in 0..2usize {
            let from = lane.column * 8u32 + comptime!((4 * output + step) as u32);
            let both = unpack(plane_shuffle(scales[fragment], from), Half::F16);
            let place = comptime!(2 * fragment + output);
            let sum = sums[place] + group.extract(output) * both.extract(0usize);
            sums[place] = sum + next.extract(output) * both.extract(1usize);
        }
    }
}

/// The products of a quarter of a group, of whose sums the first two count.
#[cube]
fn group_sums(
    words: &Array<u32>,
    pairs: &Array<u32>,
    #[comptime] codes: Codes,
) -> Vector<f32, Const<4>> {
    let mut sums = Vector::<f32, Const<4>>::zeroed();
    #[unroll]
    for product in 0..2usize {
        let first = comptime!(2 * product);
        let next = comptime!(2 * product + 1);
        sums = add_pairs(
            sums,
            pairs[first],
            pairs[next],
            numbers(words, first, codes),
            numbers(words, next, codes),
            codes.half,
        );
    }
    sums
}

/// A pair of codes as halves: of a word those that lie 16 bits apart.
#[cube]
fn numbers(words: &Array<u32>, #[comptime] pair: usize, #[comptime] codes: Codes) -> u32 {
    let of_word = comptime!(16 / codes.bits);
    let word = words[comptime!(pair / of_word)] >> comptime!((pair % of_word * codes.bits) as u32);
    let bits = (word & comptime!(codes.mask())) | comptime!(codes.base());
    if comptime!(codes.has_top()) {
        // bf16 has 7 bits below 128: minus 256 where the code's top bit is 0, minus 128 where it is 1.
        let shift = (word & 0x0080_0080u32) ^ 0xc380_c380u32;
        add_halves(bits, shift, codes.half)
    } else {
        add_halves(bits, comptime!(codes.shift()), codes.half)
    }
}

/// The pairs of 8 columns of the input, as pairs of codes are.
#[cube]
fn as_codes_lie(pairs: &mut Array<u32>, row: Vector<u32, Const<4>>, #[comptime] codes: Codes) {
    // Words of the input from one to that of the column 16 bits further.
    let apart = comptime!(8 / codes.bits);
    #[unroll]
    for two in 0..2usize {
        let first = comptime!(two * 2 / apart);
        let one = row.extract(first);
        let other = row.extract(comptime!(first + apart));
        pairs[comptime!(2 * two)] = (one & 0xffffu32) | (other << 16u32);
        pairs[comptime!(2 * two + 1)] = (one >> 16u32) | (other & 0xffff_0000u32);
    }
}
