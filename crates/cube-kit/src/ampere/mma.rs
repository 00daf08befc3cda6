//! Matrix products of a warp on tensor cores, with `mma.sync` of 16 × 8 × 16. `ldmatrix` loads the right operand from
//! shared memory. For [`Scores`] (QK) and [`SharedSums`], `ldmatrix` also loads the left operand. For [`Sums`] (PV),
//! the left operand is in registers.
//!
//! One PTX text multiplies a whole block and updates the accumulators in place, so that ptxas may reorder the loads and
//! `mma.sync`.
//!
//! A warp has `fragments` fragments of 16 rows. In each fragment, register `i` of lane `l` holds the element in row
//! `l / 4 + 8 (i / 2 % 2)` and column `8 (i / 4) + 2 (l % 4) + i % 2`, as in
//! [accumulators](crate::nvidia::accumulator). The registers of different fragments follow one another in a register
//! vector.

use super::FRAGMENT_ROWS;
use crate::hopper::wgmma::{STEP, STEP_BYTES, SUBTILE_STEPS, moves, registers};
use crate::nvidia::ptx::value_of;
use crate::nvidia::{Half, ROW_BYTES, registers as vector_of};
use cubecl::prelude::*;

/// The multiplication `left · rightᵀ`, which sums over the columns of both operands. An example is the product of
/// queries and keys, S = Q Kᵀ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scores {
    /// The number of 16-row fragments per warp.
    pub fragments: usize,
    /// The number of rows of the right operand, which is the number of columns of the result.
    pub columns: usize,
    /// The number of columns of both operands, which is the inner dimension of the multiplication.
    pub depth: usize,
    /// The number of rows in each 64-column subtile of the left operand in shared memory.
    pub left_rows: usize,
    /// The number of rows in each 64-column subtile of the right operand in shared memory.
    pub right_rows: usize,
    /// The precision of the operands.
    pub half: Half,
}

/// The multiplication `sum += left · right` with the left operand in registers. The sum is over the right operand's
/// rows. An example is the product of probabilities and values, O += P V.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sums {
    /// The number of 16-row fragments per warp.
    pub fragments: usize,
    /// The number of columns of the right operand and of the result.
    pub columns: usize,
    /// The number of rows of the right operand, which is the inner dimension of the multiplication.
    pub depth: usize,
    /// The number of rows in each 64-column subtile of the right operand in shared memory.
    pub right_rows: usize,
    /// True if the multiplication replaces some rows of the right operand by zeros. The argument `used` has a bit for
    /// each row, and a row is replaced if its bit is 0. Such a row may contain NaN, and the product of NaN and a zero
    /// of the left operand would be NaN.
    pub masked: bool,
    /// The precision of the operands.
    pub half: Half,
}

/// The multiplication `sum += left · right` with both operands in shared memory. Several warps may compute the same
/// rows of the result. In this case, the warps divide the columns among them, in groups of 16 columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SharedSums {
    /// The number of 16-row fragments per warp.
    pub fragments: usize,
    /// The number of groups of 16 result columns that each warp computes.
    pub steps: usize,
    /// The index, among the warp's groups of 16 result columns, of the first group to which the multiplication adds its
    /// product.
    pub first_step: usize,
    /// The number of groups of 16 result columns, for each warp, to which the multiplication adds its product. The
    /// right operand contains only the columns of these groups of all warps.
    pub added_steps: usize,
    /// The number of warps that divide the result's columns among them: 1, 2, 4 or 8.
    pub groups: usize,
    /// The index of the left operand's column that is multiplied with the right operand's first row.
    pub first_depth: usize,
    /// The number of rows of the right operand, which is the inner dimension of the multiplication.
    pub depth: usize,
    /// The number of rows in each 64-column subtile of the left operand in shared memory.
    pub left_rows: usize,
    /// The number of rows in each 64-column subtile of the right operand in shared memory.
    pub right_rows: usize,
    /// True if the multiplication replaces some rows of the right operand by zeros. The argument `used` has a bit for
    /// each row, and a row is replaced if its bit is 0. Such a row may contain NaN, and the product of NaN and a zero
    /// of the left operand would be NaN.
    pub masked: bool,
    /// The precision of the operands.
    pub half: Half,
}

/// Returns the number of registers in the register vector for a fragment of `columns` columns.
pub const fn fragment_registers(columns: usize) -> usize {
    vector_of(columns / 2)
}

impl Scores {
    /// Returns the number of registers in the result's register vector, for all fragments.
    pub const fn registers(&self) -> usize {
        self.fragments * fragment_registers(self.columns)
    }
}

impl Sums {
    /// Returns the number of registers in the result's register vector, for all fragments.
    pub const fn registers(&self) -> usize {
        self.fragments * fragment_registers(self.columns)
    }

    /// Returns the number of registers in the left operand's register vector, for all fragments.
    pub const fn left_registers(&self) -> usize {
        self.fragments * vector_of(self.depth / 4)
    }
}

impl SharedSums {
    /// Returns the number of registers that the result uses, for all fragments. The register vector may be longer.
    pub const fn used_registers(&self) -> usize {
        self.fragments * self.steps * STEP / 2
    }

    /// Returns the number of registers in the result's register vector.
    pub const fn registers(&self) -> usize {
        vector_of(self.used_registers())
    }
}

/// Returns PTX of one `mma.sync` of a fragment with 8 columns. `half` is the precision of the operands. The other
/// arguments are the names of the registers that hold the result, the operands and the previous sum.
pub(super) fn multiply(half: Half, sum: &str, left: &str, right: &str, before: &str) -> String {
    let half = half.ptx();
    format!(
        "mma.sync.aligned.m16n8k16.row.col.f32.{half}.{half}.f32 {{{sum}}}, {{{left}}}, {{{right}}}, {{{before}}};\n"
    )
}

/// Returns a PTX operand that lists `count` registers. Their names are `name` followed by consecutive numbers, starting
/// at `first`.
pub(super) fn named(name: &str, first: usize, count: usize) -> String {
    let names: Vec<_> = (first..first + count)
        .map(|i| format!("{name}{i}"))
        .collect();
    names.join(", ")
}

/// Returns PTX that loads four 8 × 8 matrices into the registers `{name}0` to `{name}3`. The matrices cover 16 rows and
/// 16 columns. A subtile has four groups of 16 columns, and `within` is the index of the loaded group.
///
/// The register `{address}{within}` holds the lane's swizzled address for these columns. The PTX adds `offset` bytes to
/// this address.
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

/// Returns PTX that computes the lane's swizzled address for each group of 16 columns of a 64-column subtile.
pub(super) fn addresses(name: &str, address: &str) -> String {
    (0..SUBTILE_STEPS)
        .map(|step| format!("xor.b32 {name}{step}, {address}, {};\n", step * STEP_BYTES))
        .collect()
}

/// Returns PTX that computes the masks m0 and m1 for the right operand's registers of a step of 16 rows. The mask bits
/// are in PTX operand number `used`. Bits `4 step` and `4 step + 1` are the mask bits of two neighboring rows. Bits
/// `4 step + 2` and `4 step + 3` are the mask bits of the two rows that are 8 rows further down.
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

/// Returns PTX that applies the masks m0 and m1 to the right operand's registers of 16 rows.
fn masked() -> String {
    (0..4)
        .map(|i| format!("and.b32 b{i}, b{i}, m{};\n", i % 2))
        .collect()
}

/// Returns the PTX of [`scores()`] and [`add_scores()`]. Outputs: the scores. Inputs: the previous scores if `adds` is
/// true, and then the lane's addresses of the left and right operand.
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

/// Returns the PTX of [`add_product()`]. Outputs: the sums. Inputs: the previous sums, the left operand's registers,
/// the lane's address of the right operand, and the mask bits `used` if the product is masked.
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

/// Returns the PTX of [`add_shared_product()`]. Outputs: the sums. Inputs: the previous sums, the lane's addresses of
/// the operands, and the bits `used` if the product is masked.
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

/// Returns the PTX of [`store_fragments()`]. Inputs: the lane's address, and the lane's packed pairs, with `stride`
/// registers per fragment. One step covers 16 columns.
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

/// Returns the lane's `ldmatrix` address for the warp's left operand. The 64-column subtiles start at `start`, and the
/// operand's first row is row `row` of each subtile.
///
/// For the right operand of [`Sums`], call this function with `row` 0.
#[cube]
pub fn left_address(start: u32, row: u32) -> u32 {
    let lane = UNIT_POS % 32u32;
    let own = row + lane % 16u32;
    start + own * comptime!(ROW_BYTES as u32) + (((lane / 16u32) ^ (lane % 8u32)) << 4u32)
}

/// Returns the address from which this lane's `ldmatrix` loads the right operand of [`Scores`].
#[cube]
pub fn right_address(start: u32) -> u32 {
    let lane = UNIT_POS % 32u32;
    let row = lane % 8u32 + lane / 16u32 * 8u32;
    start + row * comptime!(ROW_BYTES as u32) + (((lane / 8u32 % 2u32) ^ (lane % 8u32)) << 4u32)
}

/// Returns the lane's `ldmatrix` address for the right operand of [`SharedSums`]. `group` is the warp's index among the
/// warps that divide the result's columns. The operand lies in 64-column subtiles of `rows` rows.
#[cube]
pub fn turn_address(start: u32, group: u32, #[comptime] rows: usize) -> u32 {
    let lane = UNIT_POS % 32u32;
    let subtile = group / comptime!(SUBTILE_STEPS as u32) * comptime!((rows * ROW_BYTES) as u32);
    let piece = group % comptime!(SUBTILE_STEPS as u32) * 2u32 + lane / 16u32;
    start + subtile + lane % 16u32 * comptime!(ROW_BYTES as u32) + ((piece ^ (lane % 8u32)) << 4u32)
}

/// Returns the address at which this lane stores the first of its packed pairs of a fragment: see
/// [`store_fragments()`].
///
/// Subtiles of `rows` rows start at `start`. The fragment begins at row `row`, and covers 32 columns, starting at
/// column `32 · group`.
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

/// Stores fragments of 32 columns in shared memory, without bank conflicts, as the left operand of [`SharedSums`].
///
/// Each fragment has `stride` registers. The first 8 registers hold packed pairs of f16 or bf16, in the register order
/// of a left operand. The function stores the registers' bits, so `P` may be any 32-bit type.
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

/// Returns the scores of the warp's rows. The operands must be in shared memory.
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

/// Adds the dot products over additional columns of Q and K to the scores. Q and K must be in shared memory.
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

/// Multiplies two operands in shared memory and adds the product to `sums`.
///
/// The mask bits in `used` follow the columns of the left operand. A column's bit is the mask bit of the right
/// operand's row that the column multiplies. For each step `s` of 16 columns, lane `l` holds the bits of four columns
/// in bits `4 s` to `4 s + 3` of `used`. The columns are `c`, `c + 1`, `c + 8` and `c + 9`, where
/// `c = 16 s + 2 (l % 4)`.
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

/// Multiplies `left` by an operand in shared memory and adds the product to `sums`.
///
/// For each step `s` of 16 rows of the right operand, lane `l` holds the mask bits of four rows in bits `4 s` to
/// `4 s + 3` of `used`. The rows are `r`, `r + 1`, `r + 8` and `r + 9`, where `r = 16 s + 2 (l % 4)`.
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
