//! The tile products of Hopper: `wgmma`, by which a warpgroup multiplies 64 rows with operands that the
//! copy engine brought to shared memory, while its threads do something else.
//!
//! A product in flight writes registers that nothing may touch, so each product is one PTX text: issue, commit.
//! Its accumulator leaves the text at once, and a *fence* text later waits for the product and hands the
//! registers on; in between they must only be carried along.
//!
//! Operands are in subtiles of 64 columns: `rows × 128` bytes with the copy engine's 128-byte swizzle, in
//! which the descriptors below find rows 8 by 8, 1024 bytes apart (PTX ISA, "Asynchronous warpgroup level
//! matrix shared memory layout"). Accumulator register `i` of lane `l` of warp `w` is row
//! `16 w + l / 4 + 8 (i / 2 % 2)`, column `8 (i / 4) + 2 (l % 4) + i % 2`; P, as registers of the second
//! product's left operand, has the same layout, two columns a register.

use crate::hopper::ptx::{arrive_text, load_matrices, value_of};
use crate::hopper::{Half, Product, ROW_BYTES, ScoreProduct};
use cubecl::prelude::*;

/// Columns of one step of a product.
pub const STEP: usize = 16;

/// Bytes of a step in a row of a subtile.
pub const STEP_BYTES: usize = 2 * STEP;

/// Bytes of 16 rows of a subtile.
pub const STEP_ROWS_BYTES: usize = STEP * ROW_BYTES;

/// The upper half of every descriptor: eight rows take 1024 bytes, and the 128-byte swizzle.
const DESCRIPTOR_LAYOUT: u32 = ((8 * ROW_BYTES as u32) >> 4) | (1 << 30);

/// The lower half of the descriptor of the operand at `address` whose columns are summed over: queries,
/// keys, P.
#[cube]
pub fn descriptor(address: u32) -> u32 {
    described(address, 16usize)
}

/// The same of an operand whose rows are summed over, values, in subtiles of `subtile_bytes`.
#[cube]
pub fn transposed_descriptor(address: u32, #[comptime] subtile_bytes: usize) -> u32 {
    described(address, subtile_bytes)
}

#[cube]
fn described(address: u32, #[comptime] leading_bytes: usize) -> u32 {
    ((address & 0x3FFFFu32) >> 4u32) | comptime!(((leading_bytes as u32) >> 4) << 16)
}

/// Makes `name` the descriptor whose lower half is `low + offset`. Sums of halves are cheaper than of whole
/// descriptors; needs a register `low`.
pub fn descriptor_text(name: &str, low: &str, offset: usize) -> String {
    format!("add.u32 low, {low}, {offset};\nmov.b64 {name}, {{low, {DESCRIPTOR_LAYOUT}}};\n")
}

/// What an address in bytes adds to a descriptor.
pub const fn units(bytes: usize) -> usize {
    bytes >> 4
}

/// `count` registers of a text from `from` on, as an operand lists them.
pub fn registers(from: usize, count: usize) -> String {
    let names: Vec<_> = (from..from + count).map(|i| format!("%{i}")).collect();
    names.join(", ")
}

/// Moves `count` registers of a text from `from` on to its first ones.
pub fn moves(count: usize, from: usize) -> String {
    (0..count)
        .map(|i| format!("mov.b32 %{i}, %{};\n", from + i))
        .collect()
}

/// The instruction whose product has so many columns.
pub fn instruction(columns: usize, half: Half) -> String {
    let half = half.ptx();
    format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{half}.{half}")
}

/// `S = Q Kᵀ` of a whole block: registers of S | queries' and keys' descriptors.
fn scores_text(product: &ScoreProduct) -> String {
    let [query, key] = [0, 1].map(|i| format!("%{}", product.fragment() + i));
    let mut text = String::from("{\n.reg .pred sum;\n.reg .b64 a, b;\n.reg .b32 low;\n");
    text += "setp.ne.b32 sum, 0, 0;\nwgmma.fence.sync.aligned;\n";
    for step in 0..product.depth.div_ceil(STEP) {
        let (subtile, within) = (step / 4, step % 4 * STEP_BYTES);
        let a = units(subtile * product.left_rows * ROW_BYTES + within);
        let b = units(subtile * product.right_rows * ROW_BYTES + within);
        text += &descriptor_text("a", &query, a);
        text += &descriptor_text("b", &key, b);
        text += &format!(
            "{} {{{}}}, a, b, sum, 1, 1, 0, 0;\n",
            instruction(product.right_rows, product.half),
            registers(0, product.right_rows / 2),
        );
        if step == 0 {
            text += "setp.eq.b32 sum, 0, 0;\n";
        }
    }
    text + "wgmma.commit_group.sync.aligned;\n}\n"
}

/// `O += P V` of a whole block, P in registers: registers of O | O, P, values' descriptor.
fn output_text(product: &Product) -> String {
    let [p_fragment, o_fragment] = product.fragments();
    let p = 2 * o_fragment;
    let value = format!("%{}", p + p_fragment);
    let columns = product.columns;
    let mut text = String::from("{\n.reg .pred sum;\n.reg .b64 b;\n.reg .b32 low;\n");
    text += &moves(columns / 2, o_fragment);
    text += "setp.eq.b32 sum, 0, 0;\nwgmma.fence.sync.aligned;\n";
    for step in 0..product.depth / STEP {
        text += &descriptor_text("b", &value, units(step * STEP_ROWS_BYTES));
        text += &format!(
            "{} {{{}}}, {{{}}}, b, sum, 1, 1, 1;\n",
            instruction(columns, product.half),
            registers(0, columns / 2),
            registers(p + 4 * step, 4),
        );
    }
    text + "wgmma.commit_group.sync.aligned;\n}\n"
}

/// Waits until at most `pending` products are in flight, then says at a barrier that a stage is free:
/// `used` registers of a fragment | the same, barrier, elected.
pub fn release_text(used: usize, fragment: usize, pending: usize) -> String {
    let [barrier, elected] = [0, 1].map(|i| format!("%{}", 2 * fragment + i));
    format!(
        "{{\n.reg .pred elected;\nsetp.ne.b32 elected, {elected}, 0;\nwgmma.wait_group.sync.aligned {pending};\n{}{}}}\n",
        arrive_text(&barrier, 1),
        moves(used, fragment)
    )
}

/// Starts `S = Q Kᵀ` of a block, whose keys are there.
#[cube]
pub fn multiply_scores<NS: Size>(
    query: u32,
    key: u32,
    #[comptime] product: ScoreProduct,
) -> Vector<f32, NS> {
    let text = comptime!(scores_text(&product));
    let s: Vector<f32, NS>;
    gpu_asm!(
        "{text} // {s} {query} {key}\n",
        s = out(_) s,
        query = in(_) value_of::<u32>(query),
        key = in(_) value_of::<u32>(key)
    );
    s
}

/// Starts `O += P V` of a block, whose values are there.
#[cube]
pub fn multiply_output<NO: Size, NP: Size>(
    o: Vector<f32, NO>,
    p: Vector<u32, NP>,
    value: u32,
    #[comptime] product: Product,
) -> Vector<f32, NO> {
    let text = comptime!(output_text(&product));
    let sum: Vector<f32, NO>;
    gpu_asm!(
        "{text} // {sum} {o} {p} {value}\n",
        sum = out(_) sum,
        o = in(_) value_of::<Vector<f32, NO>>(o),
        p = in(_) value_of::<Vector<u32, NP>>(p),
        value = in(_) value_of::<u32>(value)
    );
    sum
}

/// Steps of 16 columns in a subtile.
pub const SUBTILE_STEPS: usize = 4;

/// Waits until at most `pending` products are in flight: `used` registers of a fragment | the same.
fn fence_text(used: usize, fragment: usize, pending: usize) -> String {
    format!(
        "{{\nwgmma.wait_group.sync.aligned {pending};\n{}}}\n",
        moves(used, fragment)
    )
}

/// Where the thread's row of a warp's matrices lies: of the warpgroup's 64 rows of the subtile at `subtile`, 16
/// columns from the `step`-th on. The 128-byte swizzle permutes a row's pieces of 16 bytes by its number.
#[cube]
pub fn matrix_row(subtile: u32, #[comptime] step: usize) -> u32 {
    let lane = UNIT_POS % 32u32;
    let row = UNIT_POS / 32u32 % 4u32 * 16u32 + lane % 16u32;
    let swizzle = ((lane / 16u32) ^ (lane % 8u32)) << 4u32;
    subtile + row * comptime!(ROW_BYTES as u32) + (swizzle ^ comptime!((STEP_BYTES * step) as u32))
}

/// The warp's 16 rows of `steps` steps of columns, of subtiles of `subtile_rows` rows the first of which starts at `start`, as
/// registers of a product's left operand.
#[cube]
pub fn load_rows<N: Size>(
    start: u32,
    #[comptime] subtile_rows: usize,
    #[comptime] steps: usize,
) -> Vector<u32, N> {
    let mut registers = Vector::<u32, N>::zeroed();
    #[unroll]
    for step in 0..steps {
        let subtile = start + comptime!((step / SUBTILE_STEPS * subtile_rows * ROW_BYTES) as u32);
        let loaded = load_matrices(matrix_row(subtile, comptime!(step % SUBTILE_STEPS)));
        #[unroll]
        for i in 0..4usize {
            registers.insert(comptime!(4 * step + i), loaded.extract(i));
        }
    }
    registers
}

/// A fragment of which `used` registers are used, once at most `pending` later products are in flight.
#[cube]
pub fn take_fragment<NF: Size>(
    fragment: Vector<f32, NF>,
    #[comptime] used: usize,
    #[comptime] size: usize,
    #[comptime] pending: usize,
) -> Vector<f32, NF> {
    let text = comptime!(fence_text(used, size, pending));
    let taken: Vector<f32, NF>;
    gpu_asm!(
        "{text} // {taken} {fragment}\n",
        taken = out(_) taken,
        fragment = in(_) value_of::<Vector<f32, NF>>(fragment)
    );
    taken
}

/// The same of a product whose left operand is `p`, which outlives it.
#[cube]
pub fn take_sums<NF: Size, NP: Size>(
    fragment: Vector<f32, NF>,
    p: Vector<u32, NP>,
    #[comptime] used: usize,
    #[comptime] size: usize,
    #[comptime] pending: usize,
) -> Vector<f32, NF> {
    let text = comptime!(fence_text(used, size, pending));
    let taken: Vector<f32, NF>;
    gpu_asm!(
        "{text} // {taken} {fragment} {p}\n",
        taken = out(_) taken,
        fragment = in(_) value_of::<Vector<f32, NF>>(fragment),
        p = in(_) value_of::<Vector<u32, NP>>(p)
    );
    taken
}

/// Waits until at most `pending` products are in flight, then arrives `times` times at a barrier.
#[cube]
pub fn free_chunk(empty: u32, elected: u32, #[comptime] pending: usize, #[comptime] times: usize) {
    let text = comptime!(format!(
        "{{\n.reg .pred elected;\nsetp.ne.b32 elected, %1, 0;\nwgmma.wait_group.sync.aligned {pending};\n{}}}\n",
        arrive_text("%0", times)
    ));
    gpu_asm!(
        "{text} // {empty} {elected}\n",
        empty = in(_) value_of::<u32>(empty),
        elected = in(_) value_of::<u32>(elected)
    );
}
