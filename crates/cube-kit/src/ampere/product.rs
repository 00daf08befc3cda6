//! The products of warps: `mma.sync` of 16 × 8 × 16, whose right operand, and for scores the left one, come from shared memory by
//! `ldmatrix`.
//!
//! A product of a whole block is one PTX text, whose sums are moved in place, so that the compiler may order its loads and
//! products as it likes. A warp has `fragments` times 16 rows; register `i` of lane `l` of a fragment is row
//! `l / 4 + 8 (i / 2 % 2)`, column `8 (i / 4) + 2 (l % 4) + i % 2`, as of a warpgroup's
//! [accumulator](crate::hopper::accumulator). Fragments follow each other in a vector of registers.

use super::FRAGMENT_ROWS;
use crate::hopper::ptx::value_of;
use crate::hopper::wgmma::{STEP, STEP_BYTES, SUBTILE_STEPS, moves, registers};
use crate::hopper::{Half, ROW_BYTES, registers as vector_of};
use cubecl::prelude::*;

/// `left · rightᵀ`, whose operands' columns are summed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scores {
    /// Fragments of 16 rows that a warp has.
    pub fragments: usize,
    /// Rows of the right operand: the columns of the result.
    pub columns: usize,
    /// Columns that are summed over.
    pub depth: usize,
    /// Rows of the left operand's subtiles in shared memory, and of the right one's.
    pub left_rows: usize,
    /// See `left_rows`.
    pub right_rows: usize,
    /// Their precision.
    pub half: Half,
}

/// `sum += left · right`, the left operand in registers, of which the right one's rows are summed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sums {
    /// Fragments of 16 rows that a warp has.
    pub fragments: usize,
    /// Columns of the right operand and the result.
    pub columns: usize,
    /// Rows of the right operand.
    pub depth: usize,
    /// Rows of its subtiles in shared memory.
    pub right_rows: usize,
    /// Rows that the left operand's `used` bits leave out are multiplied as zeros, whatever they hold.
    pub masked: bool,
    /// Their precision.
    pub half: Half,
}

/// `sum += left · right`, both in shared memory. Warps that share the result's rows take turns at its columns, 16 at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SharedSums {
    /// Fragments of 16 rows that a warp has.
    pub fragments: usize,
    /// Times 16 columns of the result that a warp has.
    pub steps: usize,
    /// Of these, the first that the product adds to, and how many: those that the right operand has.
    pub first_step: usize,
    /// See `first_step`.
    pub added_steps: usize,
    /// Warps that take turns: 1, 2, 4 or 8.
    pub groups: usize,
    /// The left operand's first column that is multiplied, by the right one's first row.
    pub first_depth: usize,
    /// Rows of the right operand.
    pub depth: usize,
    /// Rows of the left operand's subtiles in shared memory, and of the right one's.
    pub left_rows: usize,
    /// See `left_rows`.
    pub right_rows: usize,
    /// Rows that the `used` bits leave out are multiplied as zeros, whatever they hold.
    pub masked: bool,
    /// Their precision.
    pub half: Half,
}

/// Size of the vector of registers of a fragment of so many columns.
pub const fn fragment_registers(columns: usize) -> usize {
    vector_of(columns / 2)
}

impl Scores {
    /// Size of the result's vector of registers, of all fragments.
    pub const fn registers(&self) -> usize {
        self.fragments * fragment_registers(self.columns)
    }
}

impl Sums {
    /// Size of the result's vector of registers, of all fragments.
    pub const fn registers(&self) -> usize {
        self.fragments * fragment_registers(self.columns)
    }

    /// Of the left operand's.
    pub const fn left_registers(&self) -> usize {
        self.fragments * vector_of(self.depth / 4)
    }
}

impl SharedSums {
    /// Registers of the result, of all fragments one after the other.
    pub const fn used_registers(&self) -> usize {
        self.fragments * self.steps * STEP / 2
    }

    /// Size of their vector.
    pub const fn registers(&self) -> usize {
        vector_of(self.used_registers())
    }
}

/// The product of a fragment and 8 columns: names of the sums, the left and the right registers.
pub(super) fn multiply(half: Half, sum: &str, left: &str, right: &str, before: &str) -> String {
    let half = half.ptx();
    format!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 {{{sum}}}, {{{left}}}, {{{right}}}, {{{before}}};\n"
    )
}

/// Registers `name`0 to `name``count - 1`, as an operand lists them.
pub(super) fn named(name: &str, first: usize, count: usize) -> String {
    let names: Vec<_> = (first..first + count)
        .map(|i| format!("{name}{i}"))
        .collect();
    names.join(", ")
}

/// Loads four matrices of the step `within` a subtile to `name`0 to 3: `offset` bytes from the lane's address, which is permuted for
/// each of a subtile's steps in `address`0 to 3.
pub(super) fn load(
    name: &str,
    address: &str,
    within: usize,
    offset: usize,
    transposed: bool,
) -> String {
    let transposed = if transposed { ".trans" } else { "" };
    format!(
        "ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{{}}}, [{address}{within}+{offset}];\n",
        named(name, 0, 4)
    )
}

/// The lane's address for each of a subtile's steps of columns.
pub(super) fn addresses(name: &str, address: &str) -> String {
    (0..SUBTILE_STEPS)
        .map(|step| format!("xor.b32 {name}{step}, {address}, {};\n", step * STEP_BYTES))
        .collect()
}

/// Masks of a step's right registers, m0 and m1: bits `4 step` to `4 step + 3` of the register `used` are of two neighbours, and of
/// the two 8 rows below.
fn masks(used: usize, step: usize) -> String {
    (0..2)
        .map(|pair| {
            let bit = 4 * step + 2 * pair;
            format!(
                "bfe.u32 bits, %{used}, {bit}, 1;\nmul.lo.u32 m{pair}, bits, 65535;\n\
                 bfe.u32 bits, %{used}, {}, 1;\nmad.lo.u32 m{pair}, bits, 4294901760, m{pair};\n",
                bit + 1
            )
        })
        .collect()
}

/// The right registers of a step, masked.
fn masked() -> String {
    (0..4)
        .map(|i| format!("and.b32 b{i}, b{i}, m{};\n", i % 2))
        .collect()
}

/// Registers of the scores | where it `adds` to them the same, the lane's addresses of left and right operand.
fn scores_text(product: &Scores, adds: bool) -> String {
    let count = product.registers();
    let left = if adds { 2 * count } else { count };
    let mut text = String::from(
        "{\n.reg .b32 la<4>, ra<4>, b<4>;\n.reg .f32 zero;\nmov.f32 zero, 0f00000000;\n",
    );
    for fragment in 0..product.fragments {
        text += &format!(".reg .b32 a{fragment}_<4>;\n");
    }
    if adds {
        text += &moves(count, count);
    }
    text += &addresses("la", &format!("%{left}"));
    text += &addresses("ra", &format!("%{}", left + 1));
    for step in 0..product.depth.div_ceil(STEP) {
        let (subtile, within) = (step / SUBTILE_STEPS, step % SUBTILE_STEPS);
        for fragment in 0..product.fragments {
            let rows = subtile * product.left_rows + FRAGMENT_ROWS * fragment;
            let name = format!("a{fragment}_");
            text += &load(&name, "la", within, rows * ROW_BYTES, false);
        }
        for pair in 0..product.columns / 16 {
            let rows = subtile * product.right_rows + 16 * pair;
            text += &load("b", "ra", within, rows * ROW_BYTES, false);
            for half in 0..2 {
                for fragment in 0..product.fragments {
                    let first =
                        fragment * fragment_registers(product.columns) + 8 * pair + 4 * half;
                    let sum = registers(first, 4);
                    let before = match step {
                        0 if !adds => String::from("zero, zero, zero, zero"),
                        _ => sum.clone(),
                    };
                    let left = named(&format!("a{fragment}_"), 0, 4);
                    let right = named("b", 2 * half, 2);
                    text += &multiply(product.half, &sum, &left, &right, &before);
                }
            }
        }
    }
    text + "}\n"
}

/// Registers of the sums | the same, the left operand's, the lane's address of the right one, and where it is masked the used bits.
fn sums_text(product: &Sums) -> String {
    let count = product.registers();
    let left = 2 * count;
    let address = left + product.left_registers();
    let used = address + 1;
    let mut text = String::from("{\n.reg .b32 ra<4>, b<4>, m<2>, bits;\n");
    text += &moves(count, count);
    text += &addresses("ra", &format!("%{address}"));
    for step in 0..product.depth / STEP {
        if product.masked {
            text += &masks(used, step);
        }
        for pair in 0..product.columns.div_ceil(16) {
            let (subtile, within) = (pair / SUBTILE_STEPS, pair % SUBTILE_STEPS);
            let rows = subtile * product.right_rows + STEP * step;
            text += &load("b", "ra", within, rows * ROW_BYTES, true);
            if product.masked {
                text += &masked();
            }
            for half in 0..2 {
                for fragment in 0..product.fragments {
                    let first =
                        fragment * fragment_registers(product.columns) + 8 * pair + 4 * half;
                    let sum = registers(first, 4);
                    let own = left + fragment * vector_of(product.depth / 4) + 4 * step;
                    let right = named("b", 2 * half, 2);
                    text += &multiply(product.half, &sum, &registers(own, 4), &right, &sum);
                }
            }
        }
    }
    text + "}\n"
}

/// Registers of the sums | the same, the lane's addresses of left and right operand, and where it is masked the used bits.
fn shared_sums_text(product: &SharedSums) -> String {
    let count = product.registers();
    let [left, right, used] = [0, 1, 2].map(|i| 2 * count + i);
    let mut text = String::from("{\n.reg .b32 la<4>, ra<4>, b<4>, m<2>, bits;\n");
    for fragment in 0..product.fragments {
        text += &format!(".reg .b32 a{fragment}_<4>;\n");
    }
    text += &moves(product.used_registers(), count);
    text += &addresses("la", &format!("%{left}"));
    text += &addresses("ra", &format!("%{right}"));
    for step in 0..product.depth / STEP {
        let depth = product.first_depth / STEP + step;
        let (subtile, within) = (depth / SUBTILE_STEPS, depth % SUBTILE_STEPS);
        for fragment in 0..product.fragments {
            let rows = subtile * product.left_rows + FRAGMENT_ROWS * fragment;
            let name = format!("a{fragment}_");
            text += &load(&name, "la", within, rows * ROW_BYTES, false);
        }
        if product.masked {
            text += &masks(used, depth);
        }
        for own in 0..product.added_steps {
            let turn = own * product.groups;
            let (subtile, within) = (turn / SUBTILE_STEPS, turn % SUBTILE_STEPS);
            let rows = subtile * product.right_rows + STEP * step;
            text += &load("b", "ra", within, rows * ROW_BYTES, true);
            if product.masked {
                text += &masked();
            }
            for half in 0..2 {
                for fragment in 0..product.fragments {
                    let columns = fragment * product.steps + product.first_step + own;
                    let sum = registers(8 * columns + 4 * half, 4);
                    let left = named(&format!("a{fragment}_"), 0, 4);
                    let right = named("b", 2 * half, 2);
                    text += &multiply(product.half, &sum, &left, &right, &sum);
                }
            }
        }
    }
    text + "}\n"
}

/// The lane's address and its packed pairs, `stride` registers a fragment, of 16 columns a `step`.
fn store_text(fragments: usize, steps: usize, stride: usize) -> String {
    let mut text = String::from("{\n.reg .b32 to<4>;\n");
    for tile in 0..2 * steps {
        text += &format!("xor.b32 to{tile}, %0, {};\n", tile * STEP_BYTES / 2);
    }
    for fragment in 0..fragments {
        for i in 0..4 * steps {
            let (tile, below) = (i / 2, i % 2);
            let offset = (FRAGMENT_ROWS * fragment + FRAGMENT_ROWS / 2 * below) * ROW_BYTES;
            let pair = 1 + stride * fragment + i;
            text += &format!("st.shared.b32 [to{tile}+{offset}], %{pair};\n");
        }
    }
    text + "}\n"
}

/// Where this lane's row of the warp's left operand starts, whose first row is `row` of subtiles at `start`. The right operand of
/// sums is loaded likewise, its first row 0.
#[cube]
pub fn left_address(start: u32, row: u32) -> u32 {
    let lane = UNIT_POS % 32u32;
    let own = row + lane % 16u32;
    start + own * comptime!(ROW_BYTES as u32) + (((lane / 16u32) ^ (lane % 8u32)) << 4u32)
}

/// Where this lane's row of scores' right operand starts.
#[cube]
pub fn right_address(start: u32) -> u32 {
    let lane = UNIT_POS % 32u32;
    let row = lane % 8u32 + lane / 16u32 * 8u32;
    start + row * comptime!(ROW_BYTES as u32) + (((lane / 8u32 % 2u32) ^ (lane % 8u32)) << 4u32)
}

/// Where this lane's row of shared sums' right operand starts, whose subtiles have `rows` rows, for the warp whose turn is `group`.
#[cube]
pub fn turn_address(start: u32, group: u32, #[comptime] rows: usize) -> u32 {
    let lane = UNIT_POS % 32u32;
    let subtile = group / comptime!(SUBTILE_STEPS as u32) * comptime!((rows * ROW_BYTES) as u32);
    let piece = group % comptime!(SUBTILE_STEPS as u32) * 2u32 + lane / 16u32;
    start + subtile + lane % 16u32 * comptime!(ROW_BYTES as u32) + ((piece ^ (lane % 8u32)) << 4u32)
}

/// Where this lane stores its first pair of a fragment, the first `row` of subtiles of `rows` rows at `start`, the first of 32
/// columns the `group`-th: see [`store_fragments`].
#[cube]
pub fn pair_address(start: u32, row: u32, group: u32, #[comptime] rows: usize) -> u32 {
    let lane = UNIT_POS % 32u32;
    let own = row + lane / 4u32;
    start
        + group / 2u32 * comptime!((rows * ROW_BYTES) as u32)
        + own * comptime!(ROW_BYTES as u32)
        + (((group % 2u32 * 4u32) ^ (own % 8u32)) << 4u32)
        + lane % 4u32 * 4u32
}

/// Stores fragments of 32 columns where [`SharedSums`] has its left operand: the first 8 of `stride` registers a fragment are pairs of
/// halves, whatever their type says, in the order of a left operand's registers. No two lanes meet in a bank.
#[cube]
pub fn store_fragments<P: Numeric, N: Size>(
    address: u32,
    pairs: Vector<P, N>,
    #[comptime] fragments: usize,
    #[comptime] stride: usize,
) {
    let text = comptime!(store_text(fragments, 2, stride));
    gpu_asm!(
        "{text} // {address} {pairs}\n",
        address = in(_) value_of::<u32>(address),
        pairs = in(_) value_of::<Vector<P, N>>(pairs)
    );
}

/// The scores of the warp's rows, from operands that are there.
#[cube]
pub fn scores<NS: Size>(left: u32, right: u32, #[comptime] product: Scores) -> Vector<f32, NS> {
    let text = comptime!(scores_text(&product, false));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {left} {right}\n",
        s = out(_) s,
        left = in(_) value_of::<u32>(left),
        right = in(_) value_of::<u32>(right)
    );
    s
}

/// The scores with those of further columns, from operands that are there.
#[cube]
pub fn add_scores<NS: Size>(
    scores: Vector<f32, NS>,
    left: u32,
    right: u32,
    #[comptime] product: Scores,
) -> Vector<f32, NS> {
    let text = comptime!(scores_text(&product, true));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {before} {left} {right}\n",
        s = out(_) s,
        before = in(_) value_of::<Vector<f32, NS>>(scores),
        left = in(_) value_of::<u32>(left),
        right = in(_) value_of::<u32>(right)
    );
    s
}

/// The sums with a product of operands that are there. Of the left one's columns, lane `l` has in `used` bits `4 s` to `4 s + 3` those
/// of `16 s + 2 (l % 4)`, the next, and the two 8 columns after.
#[cube]
pub fn add_shared_product<NO: Size>(
    sums: Vector<f32, NO>,
    left: u32,
    right: u32,
    used: u32,
    #[comptime] product: SharedSums,
) -> Vector<f32, NO> {
    let text = comptime!(shared_sums_text(&product));
    let sum: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {sum} {before} {left} {right} {used}\n",
        sum = out(_) sum,
        before = in(_) value_of::<Vector<f32, NO>>(sums),
        left = in(_) value_of::<u32>(left),
        right = in(_) value_of::<u32>(right),
        used = in(_) value_of::<u32>(used)
    );
    sum
}

/// The sums with a block's product, whose right operand is there. Of its rows, lane `l` has in `used` bits `4 s` to `4 s + 3` those of
/// `16 s + 2 (l % 4)`, the next, and the two 8 rows below.
#[cube]
pub fn add_product<NO: Size, NP: Size>(
    sums: Vector<f32, NO>,
    left: Vector<u32, NP>,
    right: u32,
    used: u32,
    #[comptime] product: Sums,
) -> Vector<f32, NO> {
    let text = comptime!(sums_text(&product));
    let sum: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {sum} {before} {left} {right} {used}\n",
        sum = out(_) sum,
        before = in(_) value_of::<Vector<f32, NO>>(sums),
        left = in(_) value_of::<Vector<u32, NP>>(left),
        right = in(_) value_of::<u32>(right),
        used = in(_) value_of::<u32>(used)
    );
    sum
}
